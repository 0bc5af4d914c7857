"""What a client sent becomes a request of the core, or a list of everything that is wrong with it. Nothing is stored here."""

from tokenmill_scheduler.intake.request import Intake, Taken
from tokenmill_scheduler.intake.violations import InvalidArgument, Violation, Violations

__all__ = ["Intake", "InvalidArgument", "Taken", "Violation", "Violations"]
