"""What `kvtools doctor` looks at: this machine and this environment, as far as kvtools depends on them.

A file for each subject has functions that yield `Check`s; `diagnose` runs them all. Nothing here imports TensorFlow: it
is asked in a process of its own, so that one that crashes is found out and not died of.
"""

from kvtools.doctor.check import Check
from kvtools.doctor.diagnose import SECTIONS, diagnose

__all__ = ["SECTIONS", "Check", "diagnose"]
