"""Everything that is wrong with what a client sent, collected before anything is refused."""

from __future__ import annotations

from dataclasses import dataclass

# Error details travel in gRPC metadata, which peers cut off at about 8 KB in all.
MAX_VIOLATIONS = 24
MAX_DESCRIPTION_CHARS = 200


@dataclass(frozen=True, slots=True)
class Violation:
    """`field` is the path from the message that was sent, as `request.sampling.stop[2]`."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidArgument(Exception):
    """What was sent cannot be accepted as it is (INVALID_ARGUMENT); at least one violation says why."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(str(violation) for violation in violations[:3]))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidArgument:
        return cls((Violation(field, description),))


class Violations:
    """Fields are checked one after another and all at fault are told, up to MAX_VIOLATIONS."""

    def __init__(self) -> None:
        self._found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        if len(self._found) < MAX_VIOLATIONS:
            self._found.append(Violation(field, description[:MAX_DESCRIPTION_CHARS]))

    def require(self, holds: bool, field: str, description: str) -> None:
        if not holds:
            self.add(field, description)

    def raise_any(self) -> None:
        """Raises InvalidArgument when anything was found."""
        if self._found:
            raise InvalidArgument(tuple(self._found))
