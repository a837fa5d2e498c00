"""Prints the doctor's answers on planted defects: python -m tests.support.planted.table [PATTERN ...]"""

import logging
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.support.planted.cases import DEFECTS, HEALTHY, examine, fresh, verdict
from tests.support.planted.runs import RUNS
from tests.support.recorded_runs import RecordedRun


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    cases = [*HEALTHY, *DEFECTS]
    patterns = sys.argv[1:]
    chosen = [
        candidate
        for candidate in cases
        if not patterns or any(re.search(pattern, candidate.name) for pattern in patterns)
    ]
    runs: dict[str, RecordedRun] = {}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(chosen):
            if case.run not in runs:
                folder = Path(scratch) / case.run.replace(" ", "_")
                folder.mkdir()
                runs[case.run] = RUNS[case.run](folder)
            run = fresh(runs[case.run], Path(scratch) / str(number), *case.overrides)
            case.plant(run)
            begun = time.monotonic()
            answer = examine(run)
            if not case.causes:
                judged = "clean" if answer.code == 0 else "wrong: a healthy run is accused"
                word = f"healthy run: {judged}"
            else:
                judged = verdict(case, answer)
                word = judged.split(":")[0] + ("" if case.must else " (need not be named)")
            counts[word] = counts.get(word, 0) + 1
            print(f"{case.name}: {judged}  [{time.monotonic() - begun:.0f} s, exit {answer.code}]")
            print(f"    {answer.texts[:600]}")
            remarks = answer.diagnosis.get("remarks", [])
            print(*(f"    remark: {remark}" for remark in remarks), sep="\n", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
