"""The contract suite over a directory, and over a real S3 server behind a proxy."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.objects import QUICK, ObjectStore

from kvferry.testing.proxy import Proxy
from kvferry.testing.s3 import S3Server
from kvferry.testing.tier_contract import TierContract, TierStore
from kvferry.tiers.objects.settings import ObjectSettings

_PLACES = itertools.count()


class TestObjectsInADirectory(TierContract):
    @pytest.fixture
    def store(self, obstore: None, tmp_path: Path) -> TierStore:
        return ObjectStore(ObjectSettings(f"file://{tmp_path}/objects", **QUICK))


class TestObjectsInABucket(TierContract):
    @pytest.fixture
    def store(self, s3: S3Server) -> Iterator[TierStore]:
        with Proxy(("127.0.0.1", s3.port)) as proxy:

            def trouble(on: bool) -> None:
                proxy.refusing = on
                if on:
                    proxy.reset()

            place = f"contract/run/{next(_PLACES)}"
            yield ObjectStore(s3.settings(place, port=proxy.port, **QUICK), trouble)
