"""What TLS between nodes and keepers is called, in settings and in errors."""

from kvferry import tls
from kvferry.addresses import Address
from kvferry.certificates import Contexts, Labels
from kvferry.values import TlsFiles

ENDS = tls.Ends(client="node", server="keeper", settings="keeper_tls_")
KEEPER_LABELS = Labels("tls_ca ", "tls_cert ", "tls_key ")


def keeper_contexts(files: TlsFiles) -> Contexts:
    """For connections of nodes; with ``ca`` they must show a certificate. Raises MisconfiguredError."""
    return tls.server_contexts(files, KEEPER_LABELS)


def explained(error: OSError, address: Address) -> str:
    """Why there is no connection to a keeper, in one line that says what to do."""
    return tls.explained(error, address, ENDS)
