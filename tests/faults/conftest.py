import pytest

from tests.conftest import PeerFactory
from tests.support.process import PeerProcess


@pytest.fixture
def child(spawn_peer: PeerFactory) -> PeerProcess:
    return spawn_peer()
