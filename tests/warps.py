"""A machine that runs the parts of a warp-specialised Gluon kernel on the CPU, in any order.

It executes the kernel's own source, a coroutine a warp, under stand-ins for Gluon's operations.
Before each of them the scheduler may let any other warp or copy go on. Numbers are symbols: a value
is what it was computed from, so reading a tile that is not there yet, or no longer, gives another
one. Tests compare what was stored with what should be.

What it knows of the device: a barrier in memory counts arrivals and bytes and flips its phase; a
wait passes when the phase of that parity has ended; a copy (TMA) is several messages, which land at
any time; a product (wgmma) reads its operands until it is waited for; what was stored by ordinary
means may be read by a product, or overwritten by a copy, after its thread's fence alone; the four
warps of a group meet at `thread_barrier`. It leaves out the barriers that the compiler adds, so it
is stricter than the compiled kernel.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

WARPS = 4
MESSAGE = 64  # columns of one message of a copy; rows of a tile, too


class Fault(Exception):
    """Something that the device forbids, or that may go wrong there."""


class Int(int):
    """A scalar of the kernel."""

    def to(self, _: object) -> Int:
        return self


def _lift(name: str) -> None:
    plain = getattr(int, name)

    def method(self: Int, other: object) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else Int(found)

    setattr(Int, name, method)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor"):
    _lift(f"__{_name}__")
for _name in ("lt", "le", "gt", "ge"):
    _lift(f"__{_name}__")


_NAMES: dict[tuple[Any, ...], int] = {}  # one for equal computations, so that they stay short


class Value:
    """A tensor: a name for what it was computed from. flying: of a product not waited for."""

    def __init__(self, *parts: Any) -> None:
        self.name = _NAMES.setdefault(parts, len(_NAMES))
        self.flying = False

    def now(self) -> int:
        if self.flying:
            raise Fault("a result is used before its product was waited for")
        return self.name

    def to(self, _: object) -> Value:
        return self

    def __add__(self, other: Value) -> Value:
        return Value("+", self.now(), other.now())

    def __sub__(self, other: Value) -> Value:
        return Value("-", self.now(), other.now())

    def __mul__(self, other: Value) -> Value:
        return Value("*", self.now(), other.now())

    def __neg__(self) -> Value:
        return Value("neg", self.now())


@dataclass
class Pointer:
    """An address in global memory."""

    name: str
    offset: int = 0

    def __add__(self, other: int) -> Pointer:
        return Pointer(self.name, self.offset + int(other))


@dataclass
class Barrier:
    """A barrier in shared memory, of one arrival."""

    name: str
    ended: int = 0  # phases
    pending: int = 1
    bytes: int = 0

    def add(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        if self.pending < 0:
            raise Fault(f"{self.name}: two arrivals in a phase")
        if self.pending == 0 and self.bytes == 0:
            self.ended, self.pending = self.ended + 1, 1


@dataclass
class Buffer:
    """Shared memory: what each message of a copy, or each warp's quarter of the rows, holds."""

    name: str
    holds: list[Any]
    stored: bool = False  # by warps, a quarter each; else by a copy
    landing: int = 0  # messages under way
    readers: list[str] = field(default_factory=list)  # products under way
    unfenced: set[str] = field(default_factory=set)


class Warp(greenlet):  # type: ignore[misc]
    """One warp of a group, and what it has under way."""

    def __init__(self, run: Callable[[], None], group: Group, number: int, speed: float) -> None:
        super().__init__(run)
        self.group, self.number, self.speed = group, number, speed
        self.label = f"{group.name} {number}"
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.waited: dict[str, int] = {}
        self.products: list[tuple[list[Buffer], Value]] = []
        self.stores: list[Buffer] = []


@dataclass
class Group:
    """Four warps."""

    name: str
    met: int = 0
    here: int = 0


@dataclass(frozen=True, eq=False)
class Message:
    """A part of a copy on its way."""

    buffer: Buffer
    place: int
    holds: Any
    full: Barrier


@dataclass(frozen=True)
class View:
    """Some shared memory: a buffer of `buffers`, perhaps still to be chosen, or columns of one."""

    buffers: Sequence[Buffer]
    chosen: int | None = None
    columns: tuple[int, int] | None = None

    def index(self, i: int) -> View:
        return View(self.buffers, int(i))

    def slice(self, start: int, length: int, _: int) -> View:
        return View(self.buffers, self.chosen, (start, length))

    def permute(self, _: object) -> View:
        return self

    @property
    def buffer(self) -> Buffer:
        return self.buffers[self.chosen or 0]

    def read(self, warp: Warp) -> Any:
        """What a product reads here."""
        buffer = self.buffer
        if buffer.landing:
            raise Fault(f"{warp.label} reads {buffer.name} while a copy lands there")
        if buffer.unfenced:
            raise Fault(f"{warp.label} reads {buffer.name} without a fence of {buffer.unfenced}")
        if buffer.stored:
            if len(set(buffer.holds)) > 1:
                raise Fault(f"{warp.label} reads {buffer.name}, written in part")
            return buffer.holds[warp.number]
        start, length = self.columns or (0, len(buffer.holds) * MESSAGE)
        return tuple(buffer.holds[start // MESSAGE : (start + length) // MESSAGE])

    def store(self, value: Value) -> None:
        step()
        buffer, warp = self.buffer, current()
        if buffer.readers or buffer.landing:
            raise Fault(f"{warp.label} stores to {buffer.name}, which others use")
        if not buffer.stored:
            buffer.stored, buffer.holds = True, [None] * WARPS
        buffer.holds[warp.number] = value.now()
        buffer.unfenced.add(warp.label)
        warp.stores.append(buffer)

    def load(self, _: object) -> Value:
        step()
        return Value("is", self.buffer.holds[current().number])


@dataclass(frozen=True)
class Descriptor:
    """A tensor in global memory that copies read in tiles of 64 rows."""

    name: str
    width: int

    @property
    def block_type(self) -> Descriptor:
        return self

    @property
    def nbytes(self) -> int:
        return 64 * self.width * 2


def current() -> Warp:
    found = getcurrent()
    assert isinstance(found, Warp)
    return found


def step() -> None:
    """Let others go first."""
    current().parent.switch()


def hold(ready: Callable[[], bool], what: str) -> None:
    warp = current()
    warp.ready, warp.waits_for = ready, what
    step()
    warp.ready = lambda: True


def meet() -> None:
    """gl.thread_barrier"""
    step()
    group = current().group
    group.here += 1
    turn = group.met
    if group.here == WARPS:
        group.here, group.met = 0, group.met + 1
    hold(lambda: group.met > turn, "its group")


class Bars:
    """mbarrier: one thread of a group arrives, all wait."""

    @staticmethod
    def wait(barrier: Barrier, parity: int) -> None:
        warp = current()
        count = warp.waited[barrier.name] = warp.waited.get(barrier.name, 0) + 1
        hold(lambda: barrier.ended % 2 != int(parity), f"{barrier.name} {count}")
        if barrier.ended != count:
            raise Fault(
                f"{warp.label}: wait {count} on {barrier.name} ends at phase {barrier.ended}"
            )

    @staticmethod
    def expect(barrier: Barrier, size: int) -> None:
        step()
        if current().number == 0:
            barrier.add(1, int(size))

    @staticmethod
    def arrive(barrier: Barrier) -> None:
        step()
        if current().number == 0:
            barrier.add(1, 0)


class Copies:
    """tma: messages of 64 columns, shared out among the warps of the group."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def async_copy_global_to_shared(
        self, source: Descriptor, at: Sequence[int], full: Barrier, to: View
    ) -> None:
        step()
        warp, buffer = current(), to.buffer
        for place in range(warp.number, source.width // MESSAGE, WARPS):
            if buffer.readers or buffer.unfenced:
                raise Fault(f"{warp.label} copies to {buffer.name}, which others use")
            if buffer.stored:
                buffer.stored, buffer.holds = False, [None] * (source.width // MESSAGE)
            buffer.landing += 1
            holds = (source.name, int(at[0]), int(at[1]) + place * MESSAGE)
            self._machine.messages.append(Message(buffer, place, holds, full))


def product(
    a: View | Value, b: View, acc: Value, use_acc: object = True, is_async: bool = False
) -> Value:
    """warpgroup_mma"""
    step()
    warp = current()
    views = [one for one in (a, b) if isinstance(one, View)]
    read = [one.read(warp) if isinstance(one, View) else one.now() for one in (a, b)]
    made = Value("product", acc.name if use_acc else None, *read)
    for view in views:
        view.buffer.readers.append(warp.label)
    made.flying = True
    warp.products.append(([view.buffer for view in views], made))
    return made if is_async else wait_products(0, [made])


def wait_products(left: int, deps: Sequence[Value]) -> Any:
    """warpgroup_mma_wait: all but the last `left` products have ended."""
    step()
    warp = current()
    while len(warp.products) > left:
        buffers, made = warp.products.pop(0)
        made.flying = False
        for buffer in buffers:
            buffer.readers.remove(warp.label)
    for one in deps:
        one.now()
    return deps[0] if len(deps) == 1 else tuple(deps)


def fence() -> None:
    """fence_async_shared"""
    step()
    warp = current()
    for buffer in warp.stores:
        buffer.unfenced.discard(warp.label)
    warp.stores = []


class Language:
    """gl: what the parts use of it."""

    constexpr = int32 = int64 = float32 = bfloat16 = None
    static_range = range
    thread_barrier = staticmethod(meet)
    SliceLayout = staticmethod(lambda *_: None)
    arange = staticmethod(lambda *_: Int(0))  # the first row, or column, stands for all
    expand_dims = staticmethod(lambda x, _: x)
    convert_layout = staticmethod(lambda x, _: x)
    zeros = staticmethod(lambda *_: Value("zeros"))
    cdiv = staticmethod(lambda a, b: Int(-(-a // b)))
    where = staticmethod(lambda yes, a, b: Int(a if yes else b))
    minimum = staticmethod(lambda a, b: Int(min(a, b)))

    @staticmethod
    def full(_: object, value: float, *__: object) -> Value:
        return Value("full", value)

    @staticmethod
    def max(x: Value, axis: int) -> Value:
        return Value("max", x.now(), axis)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return Value("maximum", a.now(), b.now()) if isinstance(a, Value) else Int(max(a, b))

    @staticmethod
    def exp2(x: Value) -> Value:
        return Value("exp2", x.now())

    @staticmethod
    def fma(a: Value, b: Value, c: Value) -> Value:
        return Value("fma", a.now(), b.now(), c.now())


class Machine:
    """Global memory, the copies under way, and the scheduler."""

    def __init__(self, seed: int, pages: Sequence[int]) -> None:
        self.draw = random.Random(seed)
        self.pages = pages
        self.messages: list[Message] = []
        self.stored: dict[tuple[str, int], set[tuple[str, int]]] = {}
        self.warps: list[Warp] = []
        _NAMES.clear()

    def names(self) -> dict[str, Any]:
        """What stands for Gluon's names in the parts' source."""
        language = type("gl", (Language,), {"load": self._load, "store": self._store})()
        return {
            "gl": language,
            "tl": language,
            "mbarrier": Bars,
            "tma": Copies(self),
            "warpgroup_mma": product,
            "warpgroup_mma_wait": wait_products,
            "fence_async_shared": fence,
        }

    def _load(self, at: Pointer, mask: object = True, other: int = 0) -> Int:
        if not mask:
            return Int(other)
        if not 0 <= at.offset < len(self.pages):
            raise Fault(f"page {at.offset} of {len(self.pages)}")
        return Int(self.pages[at.offset])

    def _store(self, at: Pointer, value: Value, mask: object = True) -> None:
        assert mask
        step()
        found = self.stored.setdefault((at.name, at.offset), set())
        found.add((current().label, value.now()))

    def group(self, name: str, part: Callable[[], None]) -> None:
        """Four warps that run `part`, each at a speed of its own."""
        group = Group(name)
        for number in range(WARPS):
            speed = self.draw.choice((0.02, 0.2, 1.0))
            self.warps.append(Warp(part, group, number, speed))

    def run(self) -> None:
        """Until all warps have ended. Raises Fault."""
        copies = self.draw.choice((0.02, 0.3, 3.0))
        while True:
            alive = [warp for warp in self.warps if not warp.dead]
            able: list[Any] = [warp for warp in alive if warp.ready()]
            if not alive and not self.messages:
                return
            if not able and not self.messages:
                waits = ", ".join(f"{warp.label} for {warp.waits_for}" for warp in alive)
                raise Fault(f"nobody can go on: {waits}")
            weights = [warp.speed for warp in able] + [copies] * len(self.messages)
            chosen = self.draw.choices([*able, *self.messages], weights)[0]
            if isinstance(chosen, Message):
                self._land(chosen)
            else:
                chosen.switch()

    def _land(self, message: Message) -> None:
        self.messages.remove(message)
        message.buffer.landing -= 1
        message.buffer.holds[message.place] = message.holds
        message.full.add(0, -64 * MESSAGE * 2)


def source_of(function: Any) -> str:
    """The source of a device function, without its decorator and annotations' effect."""
    text = textwrap.dedent(inspect.getsource(function.fn))
    return text[text.index("def ") :]


def define(sources: Iterable[str], names: dict[str, Any]) -> dict[str, Any]:
    """Functions of such sources, which find `names` and each other."""
    space = dict(names)
    for text in sources:
        exec(compile("from __future__ import annotations\n" + text, "<part>", "exec"), space)
    return space
