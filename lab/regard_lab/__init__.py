"""The lab: tests of every claim of the study notes.

>>> import regard_lab as lab
>>> result = lab.run("e24")
>>> result.verdict, round(result.measured / 1e10, 2)
('holds', 2.65)
>>> "scaled-example" in lab.names()
True
"""

from regard_lab.run import Result, names, run, run_all

__all__ = ["Result", "names", "run", "run_all"]
