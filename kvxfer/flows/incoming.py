"""What has become of an offer: who writes which part of it, what has arrived, and when all of it is committed. Pure.

The idea: the daemon says which box each claim writes (the boxes of an offer's claims do not overlap), the data path
says which layers of a claim have arrived and that it is committed. A notice of a claim that the daemon has not
announced yet is kept until it does; one that does not fit its claim's box is never believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvxfer.coverage import Box, Coverage, clip
from kvxfer.errors import KvxferError, ProtocolError, TooLarge
from kvxfer.wire import tags

UNEXPECTED_NOTIFICATIONS_MAX = 8192


@dataclass(slots=True)
class Writer:
    """One claim: what it writes, how many elements of each layer (by number), which of them arrived, and whether it is
    committed.
    """

    boxes: tuple[Box, ...]
    layers: dict[int, int]
    arrived: set[int] = field(default_factory=set)
    committed: bool = False
    orphaned: bool = False  # its daemon is out of reach


class Incoming:
    """The state of one offer of ``want``; ``sources`` is how many pushes are expected, if that is known."""

    def __init__(self, want: Box, sources: int | None = None) -> None:
        self.want = want
        self.writers: dict[int, Writer] = {}
        self.notices = 0
        self.committed = 0  # claims
        self._sources = sources
        self._here = Coverage(want)
        self._committed = Coverage(want)
        self._early: dict[int, list[tuple[int, int, int]]] = {}  # by claim: kind, layer, value
        self._early_count = 0
        self._visible: set[int] = set()
        self._new: list[int] = []

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Committed claims cover everything. Of nothing at all: one claim is committed."""
        return self._committed.complete and self.committed > 0

    @property
    def writing(self) -> list[Writer]:
        """Those that are not committed."""
        return [writer for writer in self.writers.values() if not writer.committed]

    @property
    def over(self) -> bool:
        """As many as were expected are committed, and something is missing all the same."""
        return self._sources is not None and self.committed >= self._sources and not self.complete

    def take_visible(self) -> list[int]:
        """Layers (by number) that have become whole since the last call."""
        new, self._new = self._new, []
        return new

    def missing(self) -> str:
        """What no committed claim covers, in words."""
        return self._committed.describe_missing()

    # -- what happens -------------------------------------------------------------------------------------------

    def claimed(self, number: int, boxes: Iterable[Box]) -> KvxferError | None:
        """The daemon announced a claim; without boxes it writes everything. What it has said before now counts.

        Returns the error that ends the offer, as `on_notification` does.
        """
        if number in self.writers:
            return None
        part = clip(boxes, [self.want]) or (self.want,)
        self.writers[number] = Writer(part, _elements(part))
        early = self._early.pop(number, [])
        self._early_count -= len(early)
        for on_notification in early:
            found = self.on_notification(number, *on_notification)
            if isinstance(found, KvxferError):
                return found
        return None

    def on_notification(self, number: int, kind: int, layer: int, value: int) -> KvxferError | str:
        """A claim says on the data path that ``value`` elements of a layer arrived, or that it is committed with so
        many layers. Returns the error that ends the offer, why the notice does not count, or "".
        """
        writer = self.writers.get(number)
        if writer is None:
            return self._keep(number, kind, layer, value)
        if writer.committed:
            return "repeated"
        try:
            return self._layer(writer, layer, value) if kind == tags.LAYER else self._commit(writer, value)
        except TooLarge as error:
            return error

    def _layer(self, writer: Writer, layer: int, elements: int) -> KvxferError | str:
        expected = writer.layers.get(layer)
        if expected is None:
            return "no_such_layer"
        if layer in writer.arrived:
            return "repeated"
        if elements and elements != expected:  # 0: one that does not count them
            what = "a push wrote another part than the one that was announced"
            return ProtocolError(what, layer=layer, said=elements, expected=expected)
        writer.arrived.add(layer)
        self.notices += 1
        for box in writer.boxes:
            self._here.add(box, layer)
        if self._here.layer_complete(layer):
            self._show([layer])
        return ""

    def _commit(self, writer: Writer, layers: int) -> KvxferError | str:
        if self.want.elements and not layers == len(writer.arrived) == len(writer.layers):
            arrived = len(writer.arrived)
            return ProtocolError("the push committed without all its layers", said=layers, arrived=arrived)
        writer.committed = True
        self.committed += 1
        self.notices += 1
        for box in writer.boxes:
            self._committed.add(box)
        if self.complete:
            self._show(self.want.layers)
        return ""

    def take_unexpected(self) -> list[int]:
        """The kinds of the notices that no announced claim ever made; they are forgotten."""
        kinds = [kind for kept in self._early.values() for kind, _, _ in kept]
        self._early.clear()
        self._early_count = 0
        return kinds

    def _show(self, layers: Iterable[int]) -> None:
        new = [layer for layer in layers if layer not in self._visible]
        self._visible.update(new)
        self._new += new

    def _keep(self, number: int, kind: int, layer: int, value: int) -> str:
        if self._early_count >= UNEXPECTED_NOTIFICATIONS_MAX:
            return "too_early"
        self._early.setdefault(number, []).append((kind, layer, value))
        self._early_count += 1
        return ""


def _elements(boxes: Iterable[Box]) -> dict[int, int]:
    """How many elements of each layer there are in boxes that do not overlap."""
    found: dict[int, int] = {}
    for box in boxes:
        for layer in box.layers:
            found[layer] = found.get(layer, 0) + box.elements // len(box.layers)
    return found
