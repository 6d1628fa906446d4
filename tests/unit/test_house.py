"""The rules of the house, read off the syntax trees: who may import whom, where state and broad excepts may live.

Each rule is a function from one source file to its violations. Every rule is run over the whole tree, and over a
small source that breaks it: a rule that finds nothing there guards nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Who may import whom. A zone may always import itself; the longest zone that a module's name begins with counts.
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "peg": (),
    "peg.__main__": ("peg",),
    "peg.cli": ("peg",),
    "peg.commands": ("peg",),
    "peg.server": (
        "peg.engine",
        "peg.token_stream",
        "peg.text",
        "peg.plan",
        "peg.failure",
        "peg.vitals",
        "peg.config",
        "peg.errors",
    ),
    "peg.text": ("peg.errors",),
    "peg.engine": (
        "peg.supervisor",
        "peg.token_stream",
        "peg.vitals",
        "peg.process_end",
        "peg.deadlines",
        "peg.masks",
        "peg.sched",
        "peg.ranks.group",
        "peg.plan",
        "peg.failure",
        "peg.config",
        "peg.errors",
    ),
    "peg.supervisor": ("peg.vitals", "peg.watch", "peg.process_end", "peg.deadlines", "peg.failure", "peg.errors"),
    "peg.token_stream": ("peg.sched", "peg.plan"),
    "peg.vitals": ("peg.failure",),
    "peg.watch": ("peg.deadlines", "peg.failure"),
    "peg.process_end": (),
    "peg.deadlines": ("peg.plan",),
    "peg.masks": ("peg.sched", "peg.plan", "peg.errors"),
    "peg.plan": ("peg.errors",),
    "peg.failure": ("peg.errors",),
    "peg.config": ("peg.errors",),
    "peg.errors": (),
    "peg.environment": ("peg.errors",),
    "peg.sched": ("peg.plan", "peg.config", "peg.errors"),
    "peg.ranks": (
        "peg.environment",
        "peg.models",
        "peg.kernels",
        "peg.checkpoint",
        "peg.plan",
        "peg.failure",
        "peg.config",
        "peg.errors",
    ),
    "peg.parity": (
        "peg.engine",
        "peg.token_stream",
        "peg.text",
        "peg.checkpoint",
        "peg.plan",
        "peg.config",
        "peg.errors",
    ),
    "peg.models": ("peg.kernels", "peg.checkpoint", "peg.plan", "peg.config", "peg.errors"),
    "peg.checkpoint": ("peg.plan", "peg.config", "peg.errors"),
    "peg.kernels": (),
}
OUTSIDE: Mapping[str, frozenset[str]] = {  # packages from outside that a zone must not know
    "peg.sched": frozenset({"torch", "asyncio", "aiohttp", "numpy"}),
    "peg.plan": frozenset({"torch", "asyncio", "aiohttp", "numpy"}),
    "peg.failure": frozenset({"torch", "asyncio", "aiohttp", "numpy"}),
}
HTTP = "aiohttp"  # only the server knows it
OPTIONAL = frozenset({"cuda", "nccl", "transformers"})  # packages that need not be there: with CUDA, with [dev]
LIGHT = ("peg.__main__", "peg.cli", "peg.commands.flags")  # --help is instant: at their top only these
CLI_TOP = ("click", "peg.cli", "peg.commands.flags", "peg.config", "peg.errors", "peg.process_end")  # and the stdlib
READ_ONLY = frozenset({"Mapping", "Sequence", "Set", "AbstractSet", "Collection", "Iterable"})
MUTABLE = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "count", "cycle"}
    | {"Lock", "RLock", "Condition", "Event", "Semaphore", "Barrier", "local", "ContextVar", "Generator", "Random"}
    | {"Queue", "SimpleQueue", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
)
BROAD_EXCEPT = (
    "peg/ranks/rank.py",
    "peg/engine.py",
    "peg/supervisor.py",
    "peg/ranks/aborts.py",  # the supervisor's helpers
    "peg/server/errors.py",
)
FOREIGN = ("peg/text/tokenizer.py",)  # the tokenizers library raises bare Exception: turned at once into peg's own


@dataclass(frozen=True)
class Source:
    """One file: its path from the root, its module name, its tree."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def zone(self) -> str:
        return max((zone for zone in ALLOWED if within(self.module, zone)), key=len)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that a statement imports; for `from a import b` that is a.b, whatever b is."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node):
                yield node, target


def at_module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import, those under a module-level if, try or with included."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def last_name(node: ast.expr | None) -> str:
    """`Mapping` for Mapping[str, int], `deque` for collections.deque(...), `Mapping` for Final[Mapping[...]]."""
    match node:
        case ast.Subscript(value=ast.Name(id="Final"), slice=inner):
            return last_name(inner)
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return last_name(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


# --- the rules --------------------------------------------------------------------------------------------


def imports_point_one_way(source: Source) -> Iterator[str]:
    allowed = (source.zone, *ALLOWED[source.zone])
    for node, target in imports(source.tree):
        if target.startswith("."):
            yield f"{node.lineno}: relative import of {target}"
        elif within(target, "peg") and not any(within(target, zone) for zone in allowed):
            yield f"{node.lineno}: {source.zone} may not import {target}"


def zones_do_not_know(source: Source) -> Iterator[str]:
    for node, target in imports(source.tree):
        package = target.partition(".")[0]
        if package in OUTSIDE.get(source.zone, ()):
            yield f"{node.lineno}: {source.zone} must not know {package}"
        if package == HTTP and source.zone not in ("peg.server", "peg.cli"):
            yield f"{node.lineno}: only peg.server knows {HTTP}"


def imports_stand_at_the_top(source: Source) -> Iterator[str]:
    """Exceptions: commands import late; packages that need not be there come in the wrapping constructor."""
    top = {id(node) for node in at_module_level(source.tree)}
    constructors = [node for node in ast.walk(source.tree) if getattr(node, "name", "") == "__init__"]
    wrapped = {id(node) for init in constructors for node in ast.walk(init)}
    for node, target in imports(source.tree):
        optional = target.partition(".")[0] in OPTIONAL
        if optional and id(node) not in wrapped:
            yield f"{node.lineno}: {target} need not be there: import it in the constructor that wraps it"
        elif id(node) not in top and not optional and source.zone != "peg.cli":
            yield f"{node.lineno}: import of {target} inside a function"


def the_command_line_is_light(source: Source) -> Iterator[str]:
    if source.module not in LIGHT:
        return
    for node in at_module_level(source.tree):
        for _, target in imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            known = target.partition(".")[0] in sys.stdlib_module_names or any(within(target, top) for top in CLI_TOP)
            if not known:
                yield f"{node.lineno}: {target} at the top makes --help slow"


def no_import_for_types_only(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING":
            for inner, target in imports(node):
                if target.startswith(".") or within(target, "peg"):
                    yield f"{inner.lineno}: type-only import of {target} hides a cycle"


def packages_hold_a_docstring(source: Source) -> Iterator[str]:
    if source.path.endswith("__init__.py") and (len(source.tree.body) != 1 or not ast.get_docstring(source.tree)):
        yield "1: an __init__.py holds a docstring and nothing else"


def modules_hold_no_state(source: Source) -> Iterator[str]:
    """A module-level list, dict or set says by a read-only type that nobody changes it; mypy holds us to that."""
    for node in at_module_level(source.tree):
        match node:
            case ast.AnnAssign(annotation=note, value=value) if value is not None:
                read_only = last_name(note) in READ_ONLY
            case ast.Assign(value=value):
                read_only = False
            case ast.FunctionDef(decorator_list=marks) if {last_name(m) for m in marks} & {"cache", "lru_cache"}:
                yield f"{node.lineno}: {node.name}'s cache is shared by all ranks"
                continue
            case _:
                continue
        display = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        if display and not read_only:
            yield f"{node.lineno}: give it a read-only type (Mapping, Sequence, Set), or make it a tuple or frozenset"
        elif isinstance(value, ast.Call) and last_name(value) in MUTABLE and not read_only:
            yield f"{node.lineno}: {last_name(value)}(...) is mutable module state"


def no_global_statement(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def broad_excepts_have_their_places(source: Source) -> Iterator[str]:
    broad = {"Exception", "BaseException"}
    for node in ast.walk(source.tree):
        match node:
            case ast.ExceptHandler(body=[ast.Raise()]) if source.path in FOREIGN:
                continue
            case ast.ExceptHandler(type=None):
                caught: list[ast.expr] = [ast.Name("BaseException")]
            case ast.ExceptHandler(type=ast.Tuple(elts=caught)):
                pass
            case ast.ExceptHandler(type=ast.expr() as kind):
                caught = [kind]
            case ast.Call(func=ast.Name("suppress") | ast.Attribute(attr="suppress"), args=caught):
                pass
            case _:
                continue
        if {last_name(kind) for kind in caught} & broad and source.path not in BROAD_EXCEPT:
            yield f"{node.lineno}: a broad except outside {', '.join(BROAD_EXCEPT)}"


def each_test_says_what_it_proves(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
            continue
        if not (ast.get_docstring(node) or "").strip():
            yield f"{node.lineno}: {node.name} has no line that says what it proves"


def no_package_under_tests(source: Source) -> Iterator[str]:
    if source.path.endswith("__init__.py"):
        yield "1: tests/http as a package would hide the standard library's http"


Rule = Callable[[Source], Iterator[str]]
PEG_RULES: tuple[tuple[Rule, str, str], ...] = (  # the rule, and a file that breaks it
    (imports_point_one_way, "peg/server/app.py", "from peg.ranks import group"),
    (imports_point_one_way, "peg/engine.py", "from peg.ranks.rank import Rank"),
    (imports_point_one_way, "peg/kernels/norm.py", "from peg.errors import PegError"),
    (imports_point_one_way, "peg/sched/blocks.py", "from . import scheduler"),
    (zones_do_not_know, "peg/sched/blocks.py", "import torch.nn"),
    (zones_do_not_know, "peg/plan.py", "from torch import Tensor"),
    (zones_do_not_know, "peg/engine.py", "from aiohttp import web"),
    (imports_stand_at_the_top, "peg/engine.py", "def f():\n    import json"),
    (imports_stand_at_the_top, "peg/ranks/nccl.py", "import nccl.core"),
    (imports_stand_at_the_top, "peg/ranks/nccl.py", "class A:\n    def close(self):\n        import nccl.core"),
    (imports_stand_at_the_top, "peg/parity/golden.py", "import transformers"),
    (the_command_line_is_light, "peg/cli.py", "import torch"),
    (the_command_line_is_light, "peg/__main__.py", "from peg import engine"),
    (no_import_for_types_only, "peg/engine.py", "if TYPE_CHECKING:\n    from peg.errors import PegError"),
    (packages_hold_a_docstring, "peg/text/__init__.py", '"""Text."""\nimport json'),
    (modules_hold_no_state, "peg/engine.py", "CACHE = {}"),
    (modules_hold_no_state, "peg/engine.py", "CACHE: dict[str, int] = {'a': 1}"),
    (modules_hold_no_state, "peg/engine.py", "if True:\n    _lock = threading.Lock()"),
    (modules_hold_no_state, "peg/engine.py", "@functools.lru_cache(maxsize=1)\ndef f():\n    return 1"),
    (no_global_statement, "peg/engine.py", "def f():\n    global A\n    A = 1"),
    (broad_excepts_have_their_places, "peg/text/stop.py", "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
    (broad_excepts_have_their_places, "peg/text/stop.py", "try:\n    f()\nexcept:\n    pass"),
    (broad_excepts_have_their_places, "peg/text/tokenizer.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (broad_excepts_have_their_places, "peg/text/stop.py", "with contextlib.suppress(Exception):\n    f()"),
)
TEST_RULES: tuple[tuple[Rule, str, str], ...] = (
    (each_test_says_what_it_proves, "tests/unit/test_a.py", "class TestA:\n    def test_b(self):\n        assert True"),
    (no_package_under_tests, "tests/http/__init__.py", '"""Tests."""'),
)
FINE = (
    ("peg/engine.py", "from peg.ranks.group import RankGroup\nfrom peg.sched import scheduler"),
    ("peg/ranks/nccl.py", "class A:\n    def __init__(self):\n        from nccl.core import Communicator"),
    ("peg/cli.py", "import click\n\ndef serve():\n    from peg.server import app"),
    ("peg/models/registry.py", "A: Mapping[str, int] = {'a': 1}\nB: Final[Mapping[str, int]] = {}\nC = (1, 2)"),
    ("peg/text/tokenizer.py", "try:\n    f()\nexcept Exception as error:\n    raise CheckpointError from error"),
    ("peg/supervisor.py", "try:\n    f()\nexcept Exception:\n    fail()"),
)


def sources(folder: str) -> list[Source]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return [Source(str(file.relative_to(ROOT)), file.read_text("utf-8")) for file in files]


def once(rules: tuple[tuple[Rule, str, str], ...]) -> list[Rule]:
    return list(dict.fromkeys(rule for rule, _, _ in rules))


def check(rule: Rule, folder: str) -> None:
    found = [f"{source.path}:{line}" for source in sources(folder) for line in rule(source)]
    assert not found, f"{rule.__name__}:\n  " + "\n  ".join(found)


@pytest.mark.parametrize("rule", once(PEG_RULES))
def test_peg_keeps_the_rule(rule: Rule) -> None:
    """No file of the package breaks this rule."""
    check(rule, "peg")


@pytest.mark.parametrize("rule", once(TEST_RULES))
def test_tests_keep_the_rule(rule: Rule) -> None:
    """No test file breaks this rule."""
    check(rule, "tests")


@pytest.mark.parametrize(("rule", "path", "text"), PEG_RULES + TEST_RULES)
def test_rule_finds_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    """Each rule reports a source that breaks it, so that its silence means something."""
    assert list(rule(Source(path, text)))


@pytest.mark.parametrize(("path", "text"), FINE)
def test_rules_leave_good_code_alone(path: str, text: str) -> None:
    """No rule reports what the house allows."""
    assert not [line for rule in once(PEG_RULES) for line in rule(Source(path, text))]


def test_every_module_has_a_zone() -> None:
    """A new file or folder directly under peg has a line in the import table."""
    assert not [source.path for source in sources("peg") if source.zone == "peg" and source.module != "peg"]


def test_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """What is over budget is shown, and fails nothing: a budget is a reason to read again."""
    over = [f"{source.path}: {line}" for source in sources("peg") for line in over_budget(source)]
    with capsys.disabled():
        print("".join(f"\nover budget: {line}" for line in over))
    long = "def f(a, b, c, d, e, f, g):\n" + "    pass\n" * 400
    assert len(list(over_budget(Source("peg/engine.py", long)))) == 3


def over_budget(source: Source) -> Iterator[str]:
    lines, most = source.text.count("\n"), 350 if source.zone == "peg.kernels" else 300
    if lines > most:
        yield f"{lines} lines, budget {most}"
    public = [node for node in source.tree.body if not getattr(node, "name", "_").startswith("_")]
    if len(public) > 7 and source.zone not in ("peg.errors", "peg.plan"):
        yield f"{len(public)} public names, budget 7"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length, taken = (node.end_lineno or node.lineno) - node.lineno + 1, node.args
            names = [arg.arg for arg in taken.posonlyargs + taken.args + taken.kwonlyargs if arg.arg != "self"]
            if length > 40:
                yield f"{node.name} has {length} lines, budget 40"
            on_device = "jit" in {
                last_name(mark) for mark in node.decorator_list
            }  # takes a pointer and strides a tensor
            if len(names) > 6 and not on_device:
                yield f"{node.name} has {len(names)} parameters, budget 6"
