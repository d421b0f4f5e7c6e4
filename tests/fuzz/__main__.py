"""`python -m tests.fuzz`: wild calls of every op and public function, until one goes wrong.

Each call is chosen by the seed and its own number, so that the printed command repeats it. The exit
code is 1 where something was found.
"""

from __future__ import annotations

import argparse
import mmap
import sys

from tests.fuzz import driver


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--calls", type=int, help="stop after so many calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="regular expression of the functions' names")
    parser.add_argument("--planted", action="store_true", help="with faults put in on purpose")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    progress_file = given.pop("child")
    if given["seconds"] is None and given["calls"] is None:
        given["seconds"] = 60.0
    options = driver.Options(**given)
    if progress_file is not None:
        with open(progress_file, "r+b") as file:
            driver.run_calls(options, mmap.mmap(file.fileno(), 8))
        return 0
    report = driver.fuzz(options)
    rate = report.calls / max(report.seconds, 1e-9)
    print(
        f"{report.calls:,} calls in {report.seconds:.1f} s ({rate:,.0f}/s) on {options.device}, "
        f"seed {options.seed}: {len(report.findings)} kinds of findings"
    )
    print(", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.most_common()))
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
