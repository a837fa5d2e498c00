// A table of any length: only the rows that are seen exist. Its rows are sorted by a column and chosen with the keyboard.

const ROW_HEIGHT = 30;

/**
 * A table: { columns, label, choose }. columns: { name, title, width, cell(row) -> node, key(row) -> what sorts, number };
 * choose(row) is called when a row is chosen, be it by keyboard or pointer.
 */
class Table {
  constructor(settings) {
    Object.assign(this, settings);
    this.rows = [];
    this.order = [];
    this.sorted = { column: null, falling: false };
    this.chosen = -1;
    this.id = `table${Table.made = (Table.made || 0) + 1}`;
    this.heads = this.columns.map((column) => el("div", { role: "columnheader", class: column.number ? "number" : "", "aria-sort": "none" },
      el("button", { text: column.name, title: column.title, onclick: () => this.sortBy(column) })));
    this.space = el("div", { class: "rows", role: "rowgroup" });
    this.scroller = el("div", { class: "scroller", tabindex: -1, role: "presentation" }, this.space);
    this.head = el("div", { role: "row", class: "table-head" }, ...this.heads);
    this.element = el("div", { class: "table", role: "grid", "aria-label": this.label, tabindex: 0 }, el("div", { role: "rowgroup" }, this.head), this.scroller);
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    this.element.style.setProperty("--columns", this.columns.map((column) => column.width).join(" "));
  }

  show(rows) {
    this.rows = rows;
    this.element.setAttribute("aria-rowcount", rows.length + 1);
    this.chosen = -1;
    this.arrange();
    this.scroller.scrollTop = 0;
    this.draw();
  }

  arrange() {
    const { column, falling } = this.sorted;
    this.order = this.rows.map((_, place) => place);
    if (column) {
      const keys = this.rows.map(column.key), sign = falling ? -1 : 1;
      const missing = (key) => key === null || key === undefined || key === "";
      this.order.sort((a, b) => {
        if (missing(keys[a]) || missing(keys[b])) return missing(keys[a]) - missing(keys[b]) || a - b;
        return keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b;
      });
    }
    this.heads.forEach((head, place) => head.setAttribute("aria-sort", this.columns[place] !== column ? "none" : falling ? "descending" : "ascending"));
    this.space.style.height = `${this.rows.length * ROW_HEIGHT}px`;
  }

  sortBy(column) {
    const again = this.sorted.column === column;
    this.sorted = again && this.sorted.falling !== !!column.number ? { column: null, falling: false }
      : { column, falling: again ? !this.sorted.falling : !!column.number };
    const row = this.order[this.chosen];
    this.arrange();
    this.chosen = row === undefined ? -1 : this.order.indexOf(row);
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(this.order.length, first + Math.ceil(this.scroller.clientHeight / ROW_HEIGHT) + 16);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.row(place));
    this.space.replaceChildren(...rows);
    const chosen = rows.some((row) => row.id === this.rowId(this.chosen));
    if (chosen) this.element.setAttribute("aria-activedescendant", this.rowId(this.chosen));
    else this.element.removeAttribute("aria-activedescendant");
  }

  rowId(place) {
    return `${this.id}-row${place}`;
  }

  row(place) {
    const row = this.rows[this.order[place]], chosen = place === this.chosen;
    const cells = this.columns.map((column) => el("div", { role: "gridcell", class: column.number ? "number" : "" }, column.cell(row)));
    const node = el("div", { role: "row", class: `row${chosen ? " chosen" : ""}`, id: this.rowId(place), "aria-rowindex": place + 2, "aria-selected": String(chosen) }, ...cells);
    node.style.top = `${place * ROW_HEIGHT}px`;
    node.addEventListener("click", () => { this.select(place); this.element.focus({ preventScroll: true }); });
    return node;
  }

  select(place) {
    if (!this.order.length) return;
    this.chosen = Math.min(Math.max(place, 0), this.order.length - 1);
    const top = this.chosen * ROW_HEIGHT, height = this.scroller.clientHeight;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top + ROW_HEIGHT > this.scroller.scrollTop + height) this.scroller.scrollTop = top + ROW_HEIGHT - height;
    this.draw();
    this.choose(this.rows[this.order[this.chosen]]);
  }

  /** Chooses the row for which this is true, if there is one. */
  selectWhere(wanted) {
    const place = this.order.findIndex((number) => wanted(this.rows[number]));
    if (place >= 0) this.select(place);
    return place >= 0;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW_HEIGHT) - 1), end = this.order.length - 1;
    const to = { ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + page, PageUp: this.chosen - page, Home: 0, End: end }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.select(to);
  }
}
