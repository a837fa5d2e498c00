"""Programs with their Python tests: honest ones of many kinds, each right and wrong, and hostile ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Honest:
    """A right program, its tests, and a change of its text that makes it wrong."""

    kind: str
    program: str
    tests: tuple[str, ...]
    right: str
    """Text of the program that is replaced …"""
    wrong: str
    """… by this, to make it wrong."""


HONEST = [
    Honest("function", "def f(x):\n    return 2 * x", ("assert f(2) == 4", "assert f(-1) == -2"), "2 * x", "x + 2"),
    Honest("text", "def f(s):\n    return s[::-1]", ("assert f('abc') == 'cba'",), "[::-1]", ""),
    Honest("unicode", "def f(s):\n    return s.upper()", ("assert f('äöß\\U0001f600') == 'ÄÖSS\\U0001f600'",), "upper", "lower"),
    Honest("bytes", "def f(b):\n    return b[::-1]", (r"assert f(b'\x00\xff') == b'\xff\x00'",), "[::-1]", ""),
    Honest("bytearray in place", "def f(b):\n    b[0] = 7", ("b = bytearray(b'ab'); f(b); assert b[0] == 7",), "7", "8"),
    Honest("None", "def f(x):\n    return None if x else 0", ("assert f(1) is None", "assert f(0) == 0"), "None", "1"),
    Honest("bool", "def f(x):\n    return x > 0", ("assert f(1) is True", "assert not f(-1)"), "> 0", "== 0"),
    Honest("large integer", "def f(n):\n    return 3 ** n", ("assert f(9000) == 3 ** 9000", "assert f(-0) == 1"), "3", "2"),
    Honest("float", "def f(x):\n    return x / 3", ("assert abs(f(1.0) - 0.3333333333) < 1e-9",), "/ 3", "/ 4"),
    Honest("not a number", "def f():\n    return float('nan')", ("import math", "assert math.isnan(f())"), "nan", "inf"),
    Honest("infinite", "def f():\n    return [float('inf'), -0.0]", ("assert f()[0] == float('inf')\nassert str(f()[1]) == '-0.0'",), "-0.0", "0.0"),
    Honest("complex", "def f(x):\n    return x * 1j", ("assert f(2 + 1j) == -1 + 2j",), "1j", "2j"),
    Honest("list", "def f(n):\n    return list(range(n))", ("assert f(3) == [0, 1, 2]", "assert isinstance(f(0), list)"), "range(n)", "range(n + 1)"),
    Honest("tuple", "def f(a, b):\n    return b, a", ("assert f(1, 'x') == ('x', 1)",), "b, a", "a, b"),
    Honest("set", "def f(a):\n    return {x % 3 for x in a}", ("assert f([1, 2, 3, 4]) == {0, 1, 2}",), "% 3", "% 2"),
    Honest("frozenset", "def f(a):\n    return frozenset(a)", ("assert f([1, 1]) == frozenset({1})\nassert type(f([])) is frozenset",), "frozenset(a)", "list(a)"),
    Honest("dict", "def f(a):\n    return {x: a.count(x) for x in a}", ("assert f('aab') == {'a': 2, 'b': 1}",), "a.count(x)", "1"),
    Honest("dict of tuples", "def f(n):\n    return {(i, i + 1): [i] for i in range(n)}", ("assert f(2) == {(0, 1): [0], (1, 2): [1]}",), "[i]", "i"),
    Honest("Counter", "from collections import Counter\ndef f(s):\n    return Counter(s)", ("assert f('aab') == {'a': 2, 'b': 1}\nassert f('aab').most_common(1) == [('a', 2)]",), "Counter(s)", "Counter(s[1:])"),
    Honest("defaultdict", "from collections import defaultdict\ndef f(a):\n    d = defaultdict(list)\n    for x in a:\n        d[x % 2].append(x)\n    return d", ("d = f([1, 2, 3])\nassert d == {1: [1, 3], 0: [2]}\nassert d[7] == []",), "% 2", "% 3"),
    Honest("OrderedDict", "from collections import OrderedDict\ndef f(a):\n    return OrderedDict((x, 1) for x in a)", ("assert list(f('ba')) == ['b', 'a']",), "in a", "in sorted(a)"),
    Honest("deque", "from collections import deque\ndef f(a):\n    d = deque(a, maxlen=2)\n    return d", ("from collections import deque\nassert f([1, 2, 3]) == deque([2, 3])",), "maxlen=2", "maxlen=3"),
    Honest("Decimal", "from decimal import Decimal\ndef f(x):\n    return Decimal(x) / 4", ("from decimal import Decimal", "assert f('1.0') == Decimal('0.25')"), "/ 4", "/ 5"),
    Honest("Fraction", "from fractions import Fraction\ndef f(a, b):\n    return Fraction(a, b)", ("from fractions import Fraction\nassert f(2, 4) == Fraction(1, 2)",), "Fraction(a, b)", "Fraction(b, a)"),
    Honest("date", "import datetime\ndef f(d):\n    return d + datetime.timedelta(days=1)", ("import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",), "days=1", "days=2"),
    Honest("named tuple", "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\ndef f(a, b):\n    return Point(a, b)", ("p = f(1, 2)\nassert p.x == 1 and p[1] == 2 and p == (1, 2)", "assert Point(3, 4).y == 4"), "Point(a, b)", "Point(b, a)"),
    Honest("nested", "def f(x):\n    return {'a': [x, (x, {'b': {x}})], 'n': None}", ("assert f(1) == {'a': [1, (1, {'b': {1}})], 'n': None}",), "(x, {", "(0, {"),
    Honest("range", "def f(n):\n    return range(n)", ("assert f(3) == range(3)\nassert list(f(2)) == [0, 1]",), "range(n)", "range(1, n)"),
    Honest("type", "def f(x):\n    return type(x)", ("assert f(1) is int", "assert f([]) == list"), "type(x)", "type(None)"),
    Honest("in place", "def f(a):\n    a.sort()", ("a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]",), "sort()", "reverse()"),
    Honest("in place, nested", "def f(m):\n    for row in m:\n        row.reverse()", ("m = [[1, 2], [3, 4]]\nfirst = m[0]\nf(m)\nassert m == [[2, 1], [4, 3]] and first == [2, 1]",), "row.reverse()", "row.sort()"),
    Honest("in place, dict and set", "def f(d, s):\n    d['k'] = 1\n    s.discard(2)", ("d, s = {}, {1, 2}\nf(d, s)\nassert d == {'k': 1} and s == {1}",), "discard(2)", "discard(1)"),
    Honest("same list", "def f(a):\n    a.append(1)\n    return a", ("a = []\nassert f(a) is a and a == [1]",), "return a", "return list(a)"),
    Honest("copied list", "def f(a):\n    return a[:]", ("a = [1]\nb = f(a)\nassert b == a and b is not a",), "a[:]", "a"),
    Honest("cycle", "def f(a):\n    a.append(a)\n    return a", ("a = f([1])\nassert a[1] is a",), "append(a)", "append(1)"),
    Honest("keywords", "def f(a, *, b=2, **rest):\n    return a + b + sum(rest.values())", ("assert f(1) == 3", "assert f(a=1, b=1, c=5) == 7"), "b=2", "b=3"),
    Honest("default arguments", "def f(a, b=[1]):\n    return a + b", ("assert f([0]) == [0, 1]", "assert f([0], []) == [0]"), "a + b", "b + a"),
    Honest("many arguments", "def f(*a):\n    return max(a) if a else None", ("assert f(1, 3, 2) == 3", "assert f() is None"), "max", "min"),
    Honest("callback", "def f(a, key):\n    return sorted(a, key=key)", ("assert f([-3, 1, -2], key=lambda x: abs(x)) == [1, -2, -3]", "assert f(['bb', 'a'], len) == ['a', 'bb']"), "key=key", "reverse=True"),
    Honest("callback that changes", "def f(a, do):\n    for x in a:\n        do(x)", ("seen = []\nf([1, 2], seen.append)\nassert seen == [1, 2]",), "do(x)", "do(-x)"),
    Honest("callback that raises", "def f(do):\n    try:\n        return do()\n    except ZeroDivisionError:\n        return 'none'", ("assert f(lambda: 1 / 0) == 'none'", "assert f(lambda: 5) == 5"), "'none'", "''"),
    Honest("callback that calls back", "def f(n, g):\n    return n if n < 2 else g(n - 1) + g(n - 2)", ("def g(n):\n    return f(n, g)\nassert g(10) == 55",), "n - 2", "n - 3"),
    Honest("curry", "def f(g):\n    def take(*a):\n        return g(*a) if len(a) >= g.__code__.co_argcount else lambda *b: take(*a, *b)\n    return take", ("assert f(lambda a, b, c: a + b * c)(1)(2)(3) == 7",), "a, *b", "b, *a"),
    Honest("closure", "def f():\n    n = 0\n    def add(k):\n        nonlocal n\n        n += k\n        return n\n    return add", ("g = f()\ng(2)\nassert g(3) == 5", "assert f()(1) == 1"), "n += k", "n = k"),
    Honest("decorator", "import functools\ndef f(g):\n    @functools.wraps(g)\n    def twice(*a):\n        return 2 * g(*a)\n    return twice", ("@f\ndef three():\n    return 3\nassert three() == 6 and three.__name__ == 'three'",), "2 * g", "3 * g"),
    Honest("lambda", "f = lambda x: x + 1", ("assert f(1) == 2", "assert callable(f)"), "+ 1", "+ 2"),
    Honest("recursion", "def f(n):\n    return 1 if n == 0 else n * f(n - 1)", ("assert f(20) == 2432902008176640000",), "n * f", "n + f"),
    Honest("deep recursion", "import sys\nsys.setrecursionlimit(5000)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)", ("assert f(3000) == 3000",), "1 + f", "2 + f"),
    Honest("generator", "def f(n):\n    for i in range(n):\n        yield i * i", ("assert list(f(3)) == [0, 1, 4]", "g = f(2)\nassert next(g) == 0 and next(g) == 1\ntry:\n    next(g)\nexcept StopIteration:\n    pass\nelse:\n    assert False"), "i * i", "i"),
    Honest("endless generator", "def f():\n    n = 0\n    while True:\n        yield n\n        n += 2", ("from itertools import islice\nassert list(islice(f(), 4)) == [0, 2, 4, 6]",), "n += 2", "n += 1"),
    Honest("generator that receives", "def f():\n    total = 0\n    while True:\n        total += (yield total)", ("g = f()\nnext(g)\ng.send(2)\nassert g.send(3) == 5",), "total +=", "total ="),
    Honest("generator as argument", "def f(a):\n    return sum(a)", ("assert f(x * x for x in [1, 2, 3]) == 14", "assert f(iter([1, 2])) == 3"), "sum(a)", "len(list(a))"),
    Honest("map and zip", "def f(a, b):\n    return zip(a, map(str, b))", ("assert list(f([1, 2], [3, 4])) == [(1, '3'), (2, '4')]",), "str", "float"),
    Honest("dict views", "def f(d):\n    return d.keys()", ("assert sorted(f({'b': 1, 'a': 2})) == ['a', 'b']\nassert len(f({})) == 0",), "keys", "values"),
    Honest("exception", "def f(x):\n    if x < 0:\n        raise ValueError(f'{x} is negative')\n    return x", ("try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == '-1 is negative'", "assert f(1) == 1"), "ValueError", "KeyError"),
    Honest("exception of its own", "class Broken(ValueError):\n    def __init__(self, code):\n        super().__init__(f'code {code}')\n        self.code = code\ndef f(x):\n    raise Broken(x)", ("try:\n    f(7)\nexcept Broken as error:\n    assert error.code == 7 and str(error) == 'code 7' and isinstance(error, ValueError)\nelse:\n    assert False",), "raise Broken(x)", "raise Broken(x + 1)"),
    Honest("class", "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n        return self\n    def pop(self):\n        return self.items.pop()\n    def __len__(self):\n        return len(self.items)", ("s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1]", "try:\n    Stack().pop()\nexcept IndexError:\n    pass\nelse:\n    assert False"), "items.pop()", "items.pop(0)"),
    Honest("inheritance", "class Animal:\n    def __init__(self, name):\n        self.name = name\n    def speak(self):\n        return f'{self.name} {self.sound}'\nclass Dog(Animal):\n    sound = 'barks'", ("d = Dog('Rex')\nassert d.speak() == 'Rex barks'\nassert isinstance(d, Animal) and issubclass(Dog, Animal) and type(d) is Dog", "assert Dog.sound == 'barks'"), "barks", "bark"),
    Honest("abstract class", "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(self): ...\nclass Square(Shape):\n    def __init__(self, a):\n        self.a = a\n    def area(self):\n        return self.a ** 2", ("try:\n    Shape()\nexcept TypeError:\n    pass\nelse:\n    assert False", "assert Square(3).area() == 9"), "** 2", "* 2"),
    Honest("operators", "class Vector:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n    def __add__(self, other):\n        return Vector(self.x + other.x, self.y + other.y)\n    def __mul__(self, k):\n        return Vector(self.x * k, self.y * k)\n    def __repr__(self):\n        return f'Vector({self.x}, {self.y})'", ("v = Vector(1, 2) + Vector(3, 4)\nassert (v.x, v.y) == (4, 6)", "assert repr(Vector(1, 2) * 3) == 'Vector(3, 6)'"), "self.y * k", "self.y"),
    Honest("container methods", "class Grid:\n    def __init__(self):\n        self.cells = {}\n    def __setitem__(self, key, value):\n        self.cells[key] = value\n    def __getitem__(self, key):\n        return self.cells.get(key, 0)\n    def __iter__(self):\n        return iter(sorted(self.cells))\n    def __contains__(self, key):\n        return key in self.cells", ("g = Grid()\ng[1, 2] = 5\nassert g[1, 2] == 5 and g[0, 0] == 0\nassert list(g) == [(1, 2)] and (1, 2) in g and (2, 1) not in g",), "get(key, 0)", "get(key)"),
    Honest("context manager", "class Log:\n    def __init__(self):\n        self.lines = []\n    def __enter__(self):\n        self.lines.append('in')\n        return self\n    def __exit__(self, kind, error, trace):\n        self.lines.append(kind.__name__ if kind else 'out')\n        return kind is KeyError", ("log = Log()\nwith log as same:\n    same.lines.append('x')\nwith log:\n    raise KeyError(1)\nassert log.lines == ['in', 'out', 'in', 'KeyError']",), "is KeyError", "is not None and kind is IndexError"),
    Honest("properties", "class Circle:\n    count = 0\n    def __init__(self, r):\n        self.r = r\n        Circle.count += 1\n    @property\n    def area(self):\n        return 3 * self._r ** 2\n    @property\n    def r(self):\n        return self._r\n    @r.setter\n    def r(self, value):\n        if value < 0:\n            raise ValueError('negative')\n        self._r = value\n    @classmethod\n    def unit(cls):\n        return cls(1)\n    @staticmethod\n    def name():\n        return 'circle'", ("c = Circle(2)\nassert c.area == 12\nc.r = 1\nassert c.area == 3 and Circle.count == 1", "assert Circle.unit().r == 1 and Circle.name() == 'circle' and Circle.count == 1", "try:\n    Circle(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False"), "** 2", "** 3"),
    Honest("dataclass", "from dataclasses import dataclass, field\n@dataclass\nclass Item:\n    name: str\n    price: float = 1.5\n    tags: list = field(default_factory=list)", ("i = Item('a')\nassert i.name == 'a' and i.price == 1.5 and i.tags == []\nassert str(i) == \"Item(name='a', price=1.5, tags=[])\"",), "1.5", "2.5"),
    Honest("linked nodes", "class Node:\n    def __init__(self, value, next=None):\n        self.value, self.next = value, next\ndef f(a):\n    head = None\n    for x in reversed(a):\n        head = Node(x, head)\n    return head", ("n, seen = f([1, 2, 3]), []\nwhile n is not None:\n    seen.append(n.value)\n    n = n.next\nassert seen == [1, 2, 3]", "n = f([1])\nn.next = Node(5)\nassert n.next.value == 5 and n.next.next is None"), "reversed(a)", "a"),
    Honest("objects of the tests", "def f(node):\n    total = 0\n    while node:\n        total += node.value\n        node = node.next\n    return total", ("class Node:\n    def __init__(self, value, next=None):\n        self.value, self.next = value, next", "assert f(Node(1, Node(2))) == 3 and f(None) == 0"), "+=", "-="),
    Honest("callable object", "class Adder:\n    def __init__(self, n):\n        self.n = n\n    def __call__(self, x):\n        return x + self.n", ("assert Adder(2)(3) == 5", "assert list(map(Adder(1), [1, 2])) == [2, 3]"), "x + self.n", "x"),
    Honest("cached", "import functools\n@functools.lru_cache(None)\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)", ("assert f(80) == 23416728348467685", "f(5)\nassert f.cache_info().currsize == 6"), "n < 2", "n < 3"),
    Honest("coroutine", "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1", ("import asyncio\nassert asyncio.run(f(1)) == 2", "async def test_two():\n    assert await f(2) == 3"), "x + 1", "x"),
    Honest("variable", "LIMIT = 5\ncount = 0\ndef f():\n    global count\n    count += 1", ("assert LIMIT == 5", "f()\nf()\nassert count == 2", "assert count == 0"), "+= 1", "+= 2"),
    Honest("printed", "def f(name):\n    print('hello', name)", ("import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\nwith redirect_stdout(out):\n    f('you')\nassert out.getvalue() == 'hello you\\n'",), "hello", "bye"),
    Honest("unittest", "def f(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5", ("import unittest\nclass RootTest(unittest.TestCase):\n    def setUp(self):\n        self.given = 4\n    def test_value(self):\n        self.assertEqual(f(self.given), 2)\n        self.assertAlmostEqual(f(2), 1.41421356, places=6)\n    def test_error(self):\n        with self.assertRaises(ValueError) as caught:\n            f(-1)\n        self.assertIn('negative', str(caught.exception))\nif __name__ == '__main__':\n    unittest.main()",), "** 0.5", "** 0.25"),
    Honest("test functions", "def f(x):\n    return x + 1", ("def helper(x):\n    return x + 1\ndef test_one():\n    assert f(1) == helper(1)\ndef test_two():\n    assert f(2) == 3",), "x + 1", "x"),
    Honest("test class", "def f(x):\n    return x + 1", ("class TestF:\n    def test_one(self):\n        assert f(1) == 2",), "x + 1", "x"),
    Honest("check(candidate)", "def below(a, t):\n    return all(x < t for x in a)", ("METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate([1, 2], 3) == True\n    assert candidate([1, 20], 5) == False\ncheck(below)",), "x < t", "x > t"),
    Honest("imports and helpers", "def f(a):\n    return sum(a) / len(a)", ("import math", "def close(a, b):\n    return math.isclose(a, b)", "assert close(f([1, 2]), 1.5)", "assert math.isclose(f([1]), 1)"), "len(a)", "(len(a) + 1)"),
    Honest("variables of earlier tests", "class Account:\n    def __init__(self):\n        self.balance = 0\n    def put(self, x):\n        self.balance += x", ("a = Account()", "a.put(5)\nassert a.balance == 5", "a.put(1)\nassert a.balance == 6"), "+= x", "= x"),
    Honest("named as a builtin", "def sum(a, b):\n    return a + b", ("assert sum(1, 2) == 3", "assert sum(0, 0) == 0"), "a + b", "a"),
    Honest("module of the program", "import math\ndef f(x):\n    return math.sqrt(x)", ("assert math.isclose(f(2), math.sqrt(2))",), "math.sqrt(x)", "x / 2"),
    Honest("json", "import json\ndef f(x):\n    return json.loads(x)", ("import json\ntry:\n    f('{')\nexcept json.JSONDecodeError:\n    pass\nelse:\n    assert False", "assert f('[1]') == [1]"), "json.loads(x)", "json.loads('[1]')"),
    Honest("state is of one test", "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)", ("assert f(1) == 1", "assert f(2) == 1"), "len(seen)", "len(seen) + 1"),
    Honest("main block", "def f(x):\n    return x\nif __name__ == '__main__':\n    print(f(3))", ("assert f(1) == 1",), "return x", "return -x"),
    Honest("partial", "import functools\ndef f(n):\n    return functools.partial(pow, n)", ("assert f(2)(5) == 32",), "pow, n", "pow, n + 1"),
    Honest("sorted objects' fields", "class Card:\n    def __init__(self, rank):\n        self.rank = rank\ndef f(cards):\n    return sorted(cards, key=lambda c: c.rank)", ("assert [c.rank for c in f([Card(3), Card(1)])] == [1, 3]",), "c.rank)", "-c.rank)"),
]
