"""Types that the readers of tar and Parquet files accept and return."""

from dataclasses import dataclass, field

import numpy as np

from vitkernels.errors import UsageError


@dataclass(frozen=True)
class ShardFile:
    """A shard of a split.

    name: relative to the root. location: path or URL. size: bytes.
    version: changes when the file is rewritten, such as its modification time; "" if unknown.
    sha256: of the content, if known.
    """

    name: str
    location: str
    size: int
    version: str = ""
    sha256: str = field(default="", compare=False)


@dataclass(frozen=True)
class Fields:
    """Where to find a sample's image and class.

    image: suffix of the image's tar member, or Parquet column; None finds the members or column that hold images.
    label: suffix of the member, "json.NAME" for a field of a JSON member, or column; None is "cls", or "label".
    classes: the names of the classes, for labels that are text; None if unknown.
    """

    image: str | None = None
    label: str | None = None
    classes: tuple[str, ...] | None = None

    def class_number(self, label: object, where: str) -> int:
        """Return the class of a label: a number, digits, or the name of a class. UsageError for anything else.

        Digits always mean a class number, even if a class has that name: `vitkernels data shard` writes numbers.
        """
        if isinstance(label, bytes):
            label = label.decode(errors="replace").strip()
        try:
            number = int(label)  # type: ignore[call-overload]  # TypeError is handled
        except (TypeError, ValueError):
            number = -1
        if number >= 0 and (number == label or str(number) == label):
            return number
        if not isinstance(label, str) or label not in self._numbers:
            names = " or a name in class_names.json" if self.classes else "; for names, write class_names.json"
            raise UsageError(
                f"{where} has the label {label!r}, which is not a class: expected a number of at least 0{names}",
                code="data.shard_label",
                where=where,
                label=label,
            )
        return self._numbers[label]

    @property
    def _numbers(self) -> dict[str, int]:
        found = self.__dict__.get("_by_name")
        if found is None:
            found = {name: number for number, name in enumerate(self.classes or ())}
            object.__setattr__(self, "_by_name", found)
        return found


@dataclass(frozen=True)
class ShardSamples:
    """The samples of one shard, in the order of the file.

    offsets, lengths: of the image's bytes in the file, int64 (N,). targets: int64 (N,). names: unique in the shard.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    names: list[str]


def truncated(path: str, reason: str) -> UsageError:
    """Return the error for a file that ends too early."""
    return UsageError(
        f"{path} is truncated: {reason}. Copy or write it again", code="data.shard_truncated", path=path, reason=reason
    )


def unreadable(path: str, reason: object) -> UsageError:
    """Return the error for a file whose content does not match its suffix."""
    return UsageError(
        f"{path} cannot be read: {reason}. Copy or write it again, or remove it",
        code="data.shard_unreadable",
        path=path,
        reason=str(reason),
    )
