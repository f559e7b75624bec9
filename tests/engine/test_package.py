"""The package as imported: light, typed, complete."""

import pydoc
import re
from pathlib import Path

import pytest

import crossrail as xr
from tests.support.process import assert_clean, run_script

NAMES = (
    "Address CrossrailError Engine EngineClosed EngineEvent Explanation ImmCounter Message MessageTooLong "
    "PathExplanation PeerGroup PeerLost ReceivePool Region RegionDescriptor RemoteAccessError RemoteRegionClosed "
    "Transfer TransferCancelled TransferError TransportError UsageError WaitTimeout Watcher"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(xr, name)

    assert name in xr.__all__
    assert thing.__doc__


def test_help_begins_with_the_public_names() -> None:
    """pydoc lists modules by their names, private ones first."""
    begins, _, _ = pydoc.plain(pydoc.render_doc(xr)).partition("PACKAGE CONTENTS")

    assert "_buffers" not in begins
    assert [name for name in xr.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", begins)] == []
    for module in ("kv", "weights", "moe", "sim", "testing", "observe", "topology", "integrations"):
        assert f"crossrail.{module}" in begins


def test_errors_form_the_promised_tree() -> None:
    for error in (xr.PeerLost, xr.TransferCancelled, xr.RemoteRegionClosed, xr.RemoteAccessError, xr.MessageTooLong):
        assert issubclass(error, xr.TransferError)
    for error in (xr.UsageError, xr.TransportError, xr.TransferError, xr.EngineClosed, xr.WaitTimeout):
        assert issubclass(error, xr.CrossrailError)
    assert issubclass(xr.UsageError, ValueError)
    assert issubclass(xr.WaitTimeout, TimeoutError)


@pytest.mark.parametrize("package", ["kv", "weights", "moe", "sim"])
def test_names_of_a_system_are_there_before_they_are_loaded(package: str) -> None:
    """Who asks the command line for help, or catches its errors, need not wait for the rest."""
    script = run_script(
        """
        import importlib, sys
        package = importlib.import_module("crossrail." + sys.argv[1])
        importlib.import_module(package.__name__ + (".profiles" if sys.argv[1] == "sim" else ".errors"))
        assert not {"numpy", "crossrail._core"} & set(sys.modules)
        assert set(package.__all__) <= set(dir(package)) and not hasattr(package, "Nothing")
        assert all(getattr(package, name) is not None for name in package.__all__)
        """,
        package,
    )

    assert_clean(script)


def test_names_and_modules_are_there_before_they_are_loaded() -> None:
    script = run_script(
        """
        import sys, crossrail as xr
        assert not {"numpy", "crossrail._core", "crossrail.engine"} & set(sys.modules)
        assert set(xr.__all__) <= set(dir(xr)) and xr.errors.PeerLost.__module__ == "crossrail.errors"
        assert not hasattr(xr, "Engin") and not hasattr(xr, "_nothing")
        assert xr.engine.Engine is xr.Engine and "Engine" in vars(xr)

        import pickle
        assert type(pickle.loads(pickle.dumps(xr.UsageError("x")))) is xr.UsageError
        from crossrail import *
        assert all(globals()[name] is getattr(xr, name) for name in xr.__all__)
        """
    )

    assert_clean(script)


def test_an_editor_is_offered_the_public_names_alone() -> None:
    script = run_script(
        """
        import importlib, crossrail as xr

        def offered(package):
            return {name for name in dir(package) if not name.startswith("_")}

        assert offered(xr) == set(xr.__all__) - {"__version__"}
        for name in ("kv", "weights", "moe", "sim", "observe", "topology"):
            package = importlib.import_module("crossrail." + name)
            assert offered(package) - {"files", "graph", "model"} >= set(package.__all__)
            assert name == "topology" or offered(package) == set(package.__all__), offered(package)
        assert offered(xr) >= {"kv", "weights", "moe", "sim", "observe", "topology", "Engine"}
        assert {"errors", "engine", "lazily", "control"} & offered(xr) == set()
        """
    )

    assert_clean(script)


def test_a_package_that_was_not_imported_says_how() -> None:
    script = run_script(
        """
        import pytest, crossrail as xr

        with pytest.raises(AttributeError, match="no attribute 'kv': it is a module, for `import crossrail.kv`"):
            xr.kv
        with pytest.raises(AttributeError, match="no attribute 'Enigne'$") as misspelt:
            xr.Enigne
        assert (misspelt.value.name, misspelt.value.obj) == ("Enigne", xr)  # from which Python says what was meant
        import crossrail.kv
        assert xr.kv is crossrail.kv
        """
    )

    assert_clean(script)


def test_import_pulls_in_nothing_heavy() -> None:
    script = run_script(
        """
        import logging, sys, numpy  # logging's traceback brings pathlib along from Python 3.15 on
        before = set(sys.modules)
        import crossrail
        crossrail.Engine
        added = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(added & {"torch", "click", "rich", "asyncio", "multiprocessing", "concurrent", "pytest"}))
        print(*sorted(added & {"pathlib", "json", "urllib", "ipaddress"}))
        """
    )

    assert_clean(script)
    assert script.stdout.split() == []


def test_package_is_typed() -> None:
    assert (Path(xr.__file__).parent / "py.typed").exists()


def test_every_public_call_has_a_docstring() -> None:
    missing = [
        f"{name}.{attribute}"
        for name in NAMES
        for attribute, value in vars(getattr(xr, name)).items()
        if not attribute.startswith("_") and callable(value) and not value.__doc__
    ]

    assert missing == []


def test_import_in_a_subinterpreter_is_refused_and_harms_nobody() -> None:
    script = run_script(
        """
        import importlib
        import crossrail as xr

        def subinterpreters():
            for name in ("_interpreters", "_xxsubinterpreters"):  # of 3.13, and before
                try:
                    return importlib.import_module(name)
                except ImportError:
                    continue

        engine = xr.Engine("main", transport="shm")
        interpreters = subinterpreters()
        other = interpreters.create()
        try:
            said = interpreters.run_string(other, "from crossrail import Engine")
        except Exception as error:  # older ones raise it, newer ones return it
            said = error
        # Ours; or CPython's, which from 3.12 on looks before it lets us begin.
        refusals = ("cannot be imported in a subinterpreter", "does not support loading in subinterpreters")
        assert any(refusal in str(said) for refusal in refusals), said
        interpreters.destroy(other)

        region = engine.alloc(8)
        engine.submit_write(region, region.descriptor, imm=1).wait(10)
        engine.imm_counter(1).wait(1, 10)
        engine.close()
        """
    )
    assert_clean(script)


def test_import_after_removal_from_sys_modules_says_why_it_is_refused() -> None:
    """As unittest.mock.patch.dict(sys.modules) removes what was imported meanwhile."""
    script = run_script(
        """
        import sys
        from unittest import mock

        with mock.patch.dict(sys.modules):
            import crossrail as first
            engine = first.Engine("first", transport="shm")
        try:
            from crossrail import Engine
        except ImportError as error:
            assert "after its modules were removed from sys.modules" in str(error), error
        else:
            raise AssertionError("it was imported again")
        engine.close()
        """
    )

    assert_clean(script)
