"""The error tree and the exit code each branch ends a command with.

    ActorqError                      1   anything of ours that has no better name
    ├── ConfigError                 10   unknown key, wrong type, clashing settings
    ├── EnvironmentFailure          11   environment unknown, not importable, or broken
    ├── SpecError                   12   spaces we cannot carry, or two that do not match
    ├── BrokerUnreachable           13   no broker answered, or let us in
    ├── FleetBusy                   14   another learner is live on the fleet, or has taken it over
    ├── IdentityError               15   keys or enrolment bundle missing or unusable
    ├── PolicyError                 16   a policy file or message that must not run
    ├── RunError                    17   run directory or checkpoint missing or broken
    ├── RuntimeMissing              18   no TFLite runtime, TensorFlow or broker program installed
    ├── NotSolved                   19   the budget ended before the policy was good
    ├── ActorRefused                20   the learner refused this actor
    ├── MessageError                21   bytes from the network that are not a message of ours
    │   ├── DecodeError
    │   └── SignatureError
    ├── StorageError                22   a disk that is full, read-only, failing, or not ours to write to
    ├── NothingLearned              23   a run ended before the first update
    ├── Undelivered                 24   an actor did not answer an order in time
    ├── OrderRefused                25   an actor did not do what it was ordered
    └── ReleaseError                26   a release of the actor's program that must not run

Usage errors end with 2 (argparse), an interrupted learner with 130, an unexpected exception with 70, and with 75 an
actor that is to be started again as a new release.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_UNEXPECTED = 70
EXIT_AGAIN = 75
EXIT_INTERRUPTED = 130


class ActorqError(Exception):
    """The base of every error that a user is meant to read.

    Args:
        what: One sentence that says what is wrong.
        where: The file, key, topic or address it was found at.
        todo: What the reader can do about it.

    Attributes:
        said: Whoever raised it has told it to people already.
    """

    exit_code = 1
    said = False

    def __init__(self, what: str, *, where: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.todo = todo

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.todo:
            lines.append(f"  to do: {self.todo}")
        return "\n".join(lines)


class ConfigError(ActorqError):
    """A setting is unknown, has the wrong type or clashes with another."""

    exit_code = 10


class EnvironmentFailure(ActorqError):
    """The environment is unknown, cannot be imported or failed while stepping."""

    exit_code = 11


class SpecError(ActorqError):
    """A space that the contract cannot carry, or two specs that must match and do not."""

    exit_code = 12


class BrokerUnreachable(ActorqError):
    """Says that no broker of the list answered in time, or none that did let us in."""

    exit_code = 13


class FleetBusy(ActorqError):
    """Another live learner owns the fleet: it was there before, or has taken it over."""

    exit_code = 14


class IdentityError(ActorqError):
    """Keys or the enrolment bundle are missing or unusable."""

    exit_code = 15


class PolicyError(ActorqError):
    """A policy that must not run: altered, too old, too large, or made for another spec.

    Args:
        what: One sentence that says what is wrong.
        reason: Short slug under which refusals of this kind are counted.
    """

    exit_code = 16

    def __init__(self, what: str, *, reason: str = "policy", where: str = "", todo: str = "") -> None:
        super().__init__(what, where=where, todo=todo)
        self.reason = reason


class RunError(ActorqError):
    """A run directory or checkpoint that is missing, broken or in use."""

    exit_code = 17


class RuntimeMissing(ActorqError):
    """A program or runtime that the command needs is not installed."""

    exit_code = 18


class NotSolved(ActorqError):
    """The step or time budget ended before the published policy was good."""

    exit_code = 19


class NothingLearned(ActorqError):
    """A run ended before the first update: no actor came, or no experience."""

    exit_code = 23


class ActorRefused(ActorqError):
    """The learner will not take experience from this actor."""

    exit_code = 20


class MessageError(ActorqError):
    """Bytes from the network that are not a message of ours.

    Args:
        what: One sentence that says what is wrong.
        reason: Short slug under which refusals of this kind are counted.
    """

    exit_code = 21

    def __init__(self, what: str, *, reason: str, where: str = "", todo: str = "") -> None:
        super().__init__(what, where=where, todo=todo)
        self.reason = reason


class DecodeError(MessageError):
    """A payload that does not decode to the message expected at its topic."""

    def __init__(self, what: str, *, reason: str = "decode", where: str = "", todo: str = "") -> None:
        super().__init__(what, reason=reason, where=where, todo=todo)


class SignatureError(MessageError):
    """A payload whose signature or MAC is missing or wrong."""

    def __init__(self, what: str, *, reason: str = "signature", where: str = "", todo: str = "") -> None:
        super().__init__(what, reason=reason, where=where, todo=todo)


class StorageError(ActorqError):
    """The disk takes no more, or gives nothing back: it is full, read-only, failing, or access is denied."""

    exit_code = 22


class Undelivered(ActorqError):
    """An order that an actor has not answered yet. It gets it when it is back, unless the order has expired by then."""

    exit_code = 24


class OrderRefused(ActorqError):
    """An order that an actor refused, or failed at."""

    exit_code = 25


class ReleaseError(ActorqError):
    """A release of the actor's program that must not run: not signed, altered, older, too large, or unfit for a board.

    Args:
        what: One sentence that says what is wrong.
        reason: Short slug under which refusals of this kind are counted.
    """

    exit_code = 26

    def __init__(self, what: str, *, reason: str = "release", where: str = "", todo: str = "") -> None:
        super().__init__(what, where=where, todo=todo)
        self.reason = reason
