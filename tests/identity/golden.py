"""The golden vectors: what stored names and headers are, in every version of kvferry.

``python -m tests.identity.golden`` prints them; with ``--write`` it replaces golden.json. That is done
only together with a new version number in the specification: every stored byte in the world becomes
unreadable by it.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.identity.examples import CHAINS, HARD, KEY, NAMESPACE, PLAIN, chain, plain_json

from kvferry.identity.domain import DomainKey, domain_tag
from kvferry.identity.header import pack_header, pack_sealed_header, sealed_name
from kvferry.identity.names import PartKey
from kvferry.identity.namespace import encode, fingerprint
from kvferry.identity.sealing import SealingKey
from kvferry.identity.stripes import checksum, stripe_plan
from kvferry.identity.weights import model_fingerprint, revision_fingerprint

FILE = Path(__file__).with_name("golden.json")
MIB = 1 << 20
PART_SIZES = (
    1,
    4096,
    131072,
    131073,
    200000,
    MIB,
    5 * MIB // 2,
    2949120,
    4 * MIB,
    8 * MIB,
    10 * MIB,
    32 * MIB,
)


def write_model(root: Path) -> None:
    """A model directory of two tensors in one safetensors file, and one opaque weight file."""
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "U8", "shape": [10000], "data_offsets": [0, 10000]},
            "b": {"dtype": "U8", "shape": [3], "data_offsets": [10000, 10003]},
        }
    ).encode()
    data = bytes(i * 31 % 251 for i in range(10003))
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (root / "extra.bin").write_bytes((bytes(range(241)) * (4 * MIB // 241 + 1))[: 4 * MIB])
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text("{}")


def _headers() -> list[dict[str, Any]]:
    key = PartKey(NAMESPACE, bytes(range(50, 82)), 7)
    made = []
    for part_bytes, index in ((MIB, 0), (MIB, 1), (10 * MIB, 3), (100, 0)):
        plan = stripe_plan(part_bytes)
        header = pack_header(
            key,
            part_bytes=part_bytes,
            stripe=plan[index],
            stripe_count=len(plan),
            checksum=bytes(range(200, 216)),
        )
        made.append(
            {"key": plain_json(tuple(key)), "part_bytes": part_bytes, "stripe": index, "hex": header.hex()}
        )
    return made


def _sealed() -> list[dict[str, Any]]:
    """Encrypted stripes. A real writer draws the nonce; everything else follows."""
    made = []
    for seed, part_bytes, index in ((1, 100, 0), (2, MIB, 1)):
        key, nonce = bytes(range(seed, seed + 32)), bytes(range(seed, seed + 12))
        name = PartKey(NAMESPACE, bytes(range(50, 82)), 7)
        plan = stripe_plan(part_bytes)
        payload = bytes(i * 37 % 251 for i in range(plan[index].nbytes))
        named = sealed_name(name, part_bytes=part_bytes, stripe=plan[index], stripe_count=len(plan))
        sealing = SealingKey(key).sealing(named, nonce)
        encrypted = sealing.update(payload) + sealing.finalize()
        key_id = SealingKey(key).key_id
        header = pack_sealed_header(named, key_id=key_id, nonce=nonce, tag=sealing.tag)
        made.append(
            {
                "encryption_key": key.hex(),
                "nonce": nonce.hex(),
                "key": plain_json(tuple(name)),
                "part_bytes": part_bytes,
                "stripe": index,
                "payload": payload.hex(),
                "header": header.hex(),
                "encrypted": encrypted.hex(),
            }
        )
    return made


def _namespaces() -> list[dict[str, Any]]:
    return [
        {
            "spec": plain_json(spec),
            "encoding": encode(spec).hex(),
            "fingerprint": fingerprint(spec).hex(),
            "part_bytes": spec.geometry.part_bytes,
            "parts": [
                [
                    [
                        spec.geometry.part(group, tensor_rank=tensor_rank, pipeline_rank=pipeline_rank)
                        for tensor_rank in range(spec.geometry.tensor_ranks)
                    ]
                    for pipeline_rank in range(spec.geometry.pipeline_ranks)
                ]
                for group in range(len(spec.geometry.groups))
            ],
        }
        for spec in (PLAIN, HARD)
    ]


def _chains() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "key": bytes(range(32)).hex(),
            "namespace": NAMESPACE.hex(),
            "chunk_tokens": chunk_tokens,
            "tokens": count,
            "extras": plain_json(extras),
            "digests": plain_json(chain(count, extras=extras, chunk_tokens=chunk_tokens).digests),
        }
        for name, (count, chunk_tokens, extras) in CHAINS.items()
    ]


def build() -> dict[str, Any]:
    """All vectors, as JSON values."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        model = model_fingerprint(directory)
    vectors = {
        "stripes": {str(size): [s.nbytes for s in stripe_plan(size)] for size in PART_SIZES},
        "checksum": {data.hex(): checksum(data).hex() for data in (b"", b"kvferry", bytes(range(256)))},
        "headers": _headers(),
        "sealed": _sealed(),
        "key_ids": {
            "default": DomainKey.default("default").key_id.hex(),
            "équipe-β": DomainKey.default("équipe-β").key_id.hex(),
            bytes(range(32)).hex(): KEY.key_id.hex(),
        },
        "tags": [
            {"domain": name, "key_id": key.key_id.hex(), "tag": domain_tag(name, key.key_id).hex()}
            for name, key in (
                ("default", DomainKey.default("default")),
                ("équipe-β", DomainKey.default("équipe-β")),
                ("équipe-β", KEY),
            )
        ],
        "namespaces": _namespaces(),
        "chains": _chains(),
        "weights": {
            "model": model.hex(),
            "revision": revision_fingerprint("org/model", "0123456789abcdef0123456789abcdef01234567").hex(),
        },
    }
    return json.loads(json.dumps(vectors))  # type: ignore[no-any-return]


def text() -> str:
    """The golden file's content."""
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
