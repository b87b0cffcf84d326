"""Results: dataclasses with the main figures; ``json`` is the whole report of the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any, Dict, Iterator, List, Optional, Sequence


@dataclass(frozen=True)
class Range:
    """A range of bytes of a disk."""

    offset: int
    """Offset of the first byte on the disk."""
    length: int
    """Bytes."""

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Extent(Range):
    """A run of bytes of a disk, and where they are."""

    depth: int
    """The image that holds them: 0 for the one that was opened, 1 for its backing image, ..."""
    zero: bool
    """They read as zero."""
    allocated: bool
    """Space is allocated for them."""
    compressed: bool
    file: Optional[str] = None
    """The file that holds them."""
    file_offset: Optional[int] = None
    """Their offset in that file, for compressed bytes that of their cluster."""


class Extents(Sequence[Extent]):
    """The extents of a disk, in order. In a notebook: a strip of colors."""

    def __init__(self, rows: List[Extent]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._rows)

    def __repr__(self) -> str:
        data = sum(row.length for row in self._rows if not row.zero)
        return f"<{len(self._rows)} extents, {data:,} bytes of data>"

    def _repr_html_(self) -> str:
        if not self._rows:
            return "<em>no extents</em>"
        start = self._rows[0].offset
        whole = self._rows[-1].end - start
        cells = []
        for row in self._rows:
            color = "#ddd" if row.zero else ("#e69f00", "#0072b2", "#009e73", "#cc79a7")[min(row.depth, 3)]
            kind = "zero" if row.zero else f"data of image {row.depth}"
            cells.append(
                f'<rect x="{(row.offset - start) * 1000 / whole:.3f}" '
                f'width="{max(row.length * 1000 / whole, 0.2):.3f}" height="24" fill="{color}">'
                f"<title>{row.offset:,} to {row.end:,}: {escape(kind)}</title></rect>"
            )
        return f'<svg viewBox="0 0 1000 24" width="100%" height="24">{"".join(cells)}</svg>{escape(repr(self))}'


@dataclass(frozen=True)
class Info:
    """What an image's header says."""

    filename: str
    format: str
    virtual_size: int
    """Bytes of its disk."""
    actual_size: int
    """Bytes on the host."""
    cluster_size: Optional[int]
    backing_filename: Optional[str]
    snapshots: List[Dict[str, Any]]
    bitmaps: List[Dict[str, Any]]
    chain: "List[Info]" = field(repr=False, compare=False, hash=False)
    """The image that was asked for and those beneath it; of those beneath it, only they."""
    json: Dict[str, Any] = field(repr=False)

    @classmethod
    def _of(cls, links: List[Dict[str, Any]]) -> "Info":
        chain: List[Info] = []
        for link in links:
            chain.append(
                cls(
                    link["filename"],
                    link["format"],
                    link["virtual-size"],
                    link["actual-size"],
                    link.get("cluster-size"),
                    link.get("backing-filename"),
                    link["snapshots"],
                    link["bitmaps"],
                    [],
                    link,
                )
            )
        for depth, one in enumerate(chain):
            one.chain.extend(chain[depth:] if depth else chain)
        return chain[0]


@dataclass(frozen=True)
class Converted:
    """A finished conversion."""

    virtual_size: int
    seconds: float
    json: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    corruptions: int
    """Damages that are left."""
    leaks: int
    """Leaked clusters that are left."""
    repaired: int
    """Damages and leaks that were repaired."""
    findings: List[Dict[str, Any]] = field(repr=False)
    """The first findings: structure, offset, message."""
    json: Dict[str, Any] = field(repr=False)

    def __bool__(self) -> bool:
        """Whether nothing is wrong (any more)."""
        return not (self.corruptions or self.leaks)


@dataclass(frozen=True)
class Compared:
    """What a comparison found; true if the disks are equal."""

    identical: bool
    first_difference: Optional[int]
    sizes_differ: bool
    json: Dict[str, Any] = field(repr=False)

    def __bool__(self) -> bool:
        return self.identical


@dataclass(frozen=True)
class Committed:
    """A finished commit."""

    base: str
    """The image that has the overlay's data now."""
    emptied: bool
    """The overlay is empty now."""
    seconds: float
    json: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Rebased:
    """A finished rebase."""

    backing: Optional[str]
    """The name of the backing image now."""
    copied: int
    """Bytes of the disk that were copied into the overlay."""
    seconds: float
    json: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Compacted:
    """Bytes of an image on the host, before and after it was made smaller."""

    allocated_before: int
    allocated_after: int
    json: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class KeySlot:
    """A place for a key in an encrypted image."""

    number: int
    active: bool
    """It holds a key."""
    iterations: int
    """Rounds of the key derivation."""
    opened: bool
    """One of the given keys opens it."""


@dataclass(frozen=True)
class Measured:
    """Bytes that an image would have."""

    required: int
    fully_allocated: int
    json: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Verdict:
    """What an inspection found; true if nothing speaks against the image."""

    accepted: bool
    format: Optional[str]
    findings: List[Dict[str, Any]] = field(repr=False)
    json: Dict[str, Any] = field(repr=False)

    def __bool__(self) -> bool:
        return self.accepted
