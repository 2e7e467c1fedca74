"""What ranks send each other in one update, in order, and how much of it nothing hides.

``program`` is the update as one rank issues it: work, and collectives with what they wait for; it is read from
``strategy/ddp``, ``strategy/fsdp2`` and torch's FSDP2. ``tests/contract/test_fake_ranks.py`` takes real updates on 64
and 1,024 ranks of torch's fake process group and finds the very same collectives. ``exposed_seconds`` plays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unisono.plan.memory import Load
from unisono.plan.parameters import Parameter, block_parameters, gathered_bytes, reduced_bytes, root_parameters

NUM_WORDS = 6  # that a rank says with its loss, in fp64 (step, outcome.Word)
NORM_BYTES = 8  # a rank's sum of squares, in fp64 (strategy.contract.square_sum)
BUCKET_MIB = 25  # strategy.bucket_mib, where nothing else is said


@dataclass(frozen=True)
class Collective:
    """``num_bytes`` of what is gathered (all ranks' parts together), reduced or broadcast.

    ``among``: all ranks, the ``parts`` of one copy of the model, or the ``copies`` of one part.
    """

    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast
    num_bytes: int
    among: str
    purpose: str  # weights, gradients, norm, losses

    def ranks(self, load: Load) -> int:
        """Return how many ranks take part."""
        return {"all": load.ranks, "parts": load.parts, "copies": load.ranks // load.parts}[self.among]


@dataclass(frozen=True)
class Work:
    """This rank's own: a block's forward or backward, or the loss head's."""

    what: str


@dataclass(frozen=True)
class Gather:
    """Weights of a group begin to be gathered."""

    group: int
    collective: Collective


@dataclass(frozen=True)
class Use:
    """Work waits for a group's weights. In forward the gather after next may begin now; in backward the next ones."""

    group: int
    in_forward: bool


@dataclass(frozen=True)
class Reduce:
    """Gradients that are there begin to be summed. ``holds``: work goes on when the ones before have been."""

    collective: Collective
    holds: bool = False


@dataclass(frozen=True)
class Wait:
    """Work waits for all before, then for this one."""

    collective: Collective


Item = Work | Gather | Use | Reduce | Wait


def program(load: Load, *, num_micro: int, bucket_mib: int = BUCKET_MIB) -> Iterator[Item]:
    """Give an update of ``num_micro`` micro-batches a rank."""
    if load.ranks == 1:
        yield from _alone(load, num_micro)
        return
    yield from _sharded(load, num_micro) if load.is_sharded else _replicated(load, num_micro, bucket_mib)
    yield Wait(Collective("all_gather", 8 * NUM_WORDS * load.ranks, "all", "losses"))
    if load.is_sharded:
        yield Wait(Collective("all_reduce", NORM_BYTES, "parts", "norm"))
    if load.share_optimizer:
        for parameter in _trained(load):
            yield Wait(Collective("broadcast", parameter.num_bytes, "all", "weights"))


def collectives(load: Load, *, num_micro: int, bucket_mib: int = BUCKET_MIB) -> list[Collective]:
    """Return all collectives of an update, in the order in which they are issued."""
    items = program(load, num_micro=num_micro, bucket_mib=bucket_mib)
    return [item.collective for item in items if isinstance(item, (Gather, Reduce, Wait))]


def _trained(load: Load) -> Iterator[Parameter]:
    """Give all trained parameters in the order of their gradients; an embedding comes last."""
    root = root_parameters(load)
    blocks = block_parameters(load) * load.architecture.layers
    yield from (parameter for parameter in [*root[:-1], *blocks, root[-1]] if parameter.is_trained)


def _alone(load: Load, num_micro: int) -> Iterator[Item]:
    for _ in range(num_micro):
        yield from [Work("forward")] * load.architecture.layers
        yield Work("head")
        yield from [Work("backward")] * load.architecture.layers


def _replicated(load: Load, num_micro: int, bucket_mib: int) -> Iterator[Item]:
    """ddp: gradients fill buckets in the order in which the last backward makes them; a full one is summed at once."""
    yield from _alone(load, num_micro - 1)
    yield from [Work("forward")] * load.architecture.layers
    yield Work("head")
    root, limit, size = root_parameters(load), bucket_mib * 2**20, 0
    pieces = [root[:-1], *[block_parameters(load)] * load.architecture.layers, root[-1:]]
    for place, piece in enumerate(pieces):
        if 0 < place < len(pieces) - 1:
            yield Work("backward")
        for parameter in piece:
            size += parameter.num_bytes * parameter.is_trained
            if size >= limit:
                yield Reduce(Collective("all_reduce", size, "all", "gradients"))
                size = 0
    if size:
        yield Reduce(Collective("all_reduce", size, "all", "gradients"))


@dataclass(frozen=True)
class Group:
    """Parameters that fsdp2 gathers and reduces together; ``number`` in the order of forward."""

    number: int
    weights: Collective
    reduces: Sequence[Reduce]

    @property
    def gather(self) -> Gather:
        """Ask for the weights."""
        return Gather(self.number, self.weights)


def _groups(load: Load) -> tuple[Group, list[list[Group]]]:
    """Return the root's group, and each block's: in half precision its linear layers are one of their own."""
    block, kinds = block_parameters(load), [False, True] if load.is_half else [None]
    parts = [_sizes(load, [each for each in block if kind is None or each.is_linear == kind]) for kind in kinds]
    blocks = [
        [Group(1 + layer * len(kinds) + place, *sizes) for place, sizes in enumerate(parts)]
        for layer in range(load.architecture.layers)
    ]
    return Group(0, *_sizes(load, root_parameters(load))), blocks


def _sizes(load: Load, parameters: Sequence[Parameter]) -> tuple[Collective, Sequence[Reduce]]:
    """Return a group's gather of weights, filled up to equal parts, and how its gradients are summed and cut.

    With several copies of the model the parts are then summed over these.
    """
    gathered = sum(each.padded(load.parts) * gathered_bytes(each, load) for each in parameters)
    reduced = sum(each.padded(load.parts) * reduced_bytes(each, load) for each in parameters if each.is_trained)
    reduces = [Reduce(Collective("reduce_scatter", reduced, "parts", "gradients"), holds=True)]
    if load.parts < load.ranks:
        reduces.append(Reduce(Collective("all_reduce", reduced // load.parts, "copies", "gradients")))
    return Collective("all_gather", gathered, "parts", "weights"), reduces if reduced else []


def _sharded(load: Load, num_micro: int) -> Iterator[Item]:
    """fsdp2: the root is gathered once a micro-batch, a block for its forward and, unless it is kept, for its backward.

    Backward asks for the whole of a block when it has taken the weights of the one after (strategy/fsdp2,
    _gather_ahead); a block's norms, whose group ends in forward after the linear layers', come first in it.
    """
    root, blocks = _groups(load)
    back = blocks[::-1]
    for micro in range(1, num_micro + 1):
        for groups in [[root], *blocks]:
            for group in groups:
                yield group.gather
                yield Use(group.number, in_forward=True)
            if groups[0] is not root:
                yield Work("forward")
        yield Work("head")
        exchanges = micro == num_micro or load.exchanges_always
        gathers = not load.keeps_gathered
        yield from [group.gather for group in back[0] if gathers]
        for block, following in zip(back, [*back[1:], []]):
            yield from [Use(group.number, in_forward=False) for group in block if gathers]
            yield from [group.gather for group in following if gathers]
            yield Work("backward")
            for group in reversed(block) if exchanges else ():
                yield from group.reduces
        if exchanges:
            yield from root.reduces


def exposed_seconds(
    items: Iterator[Item],
    work_seconds: Callable[[str], float],
    cost: Callable[[Collective], tuple[str, float]],
) -> float:
    """Play a program and return by how much it takes longer than its work alone.

    ``cost`` names the wire that a collective takes, and its seconds on it: those on one wire follow one another.
    Streams and events are those of torch's FSDP2 (FSDPParamGroup.wait_for_unshard, post_backward) and of ddp.
    """
    now = worked = gate = used = reduced = 0.0
    wires: dict[str, float] = {}
    gathered: dict[int, float] = {}

    def send(collective: Collective, ready: float) -> float:
        wire, seconds = cost(collective)
        wires[wire] = max(wires.get(wire, 0.0), ready) + seconds
        return wires[wire]

    for item in items:
        if isinstance(item, Work):
            now += work_seconds(item.what)
            worked += work_seconds(item.what)
        elif isinstance(item, Gather):
            gathered[item.group] = send(item.collective, gate)
        elif isinstance(item, Use):
            now = max(now, gathered[item.group])
            gate, used = (used if item.in_forward else now), now
        elif isinstance(item, Reduce):
            now = max(now, reduced) if item.holds else now
            end = send(item.collective, max(now, reduced) if item.collective.among == "copies" else now)
            reduced = end if item.holds else reduced
        else:
            now = send(item.collective, max(now, *wires.values(), 0.0))
    return max(now, *wires.values(), 0.0) - worked
