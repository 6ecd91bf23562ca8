"""The contracts of semel's protocols as abstract pytest classes, for users' implementations too.

sink     sink_phases sink_undo sink_world
ledger   ledger_decisions ledger_world
broker   broker_sharing broker_world
claims
receiver
contract    what all of them have

The first file of a line is the whole contract; its parts follow, and the last one (…_world)
holds what an author supplies.
"""

import importlib.util
import pkgutil

if importlib.util.find_spec("pytest"):
    import pytest

    # Failing assertions in the contracts then show the values they compared.
    pytest.register_assert_rewrite(
        *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    )
