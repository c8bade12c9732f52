"""Who gets in: the trust of a router's settings, and what is said of an address that is open to all."""

import ipaddress
import logging

from kvferry.router.settings import RouterSettings
from kvferry.router.trust import PUBLIC_SECRET, Rules, Trust, Unlisted
from kvferry.router.trustfile import read_rules

log = logging.getLogger("kvferry.router")


def trust_of(settings: RouterSettings) -> Trust:
    """From its file, as it is now. Raises MisconfiguredError."""
    rules = Rules() if settings.trust is None else read_rules(settings.trust)
    if settings.worker_api_key is not None and not _refuses(settings, rules):
        log.warning(
            "worker_api_key is sent for whoever reaches %s: let a trust file say who may", settings.listen
        )
    return Trust(rules, settings.trust_secret or PUBLIC_SECRET)


def complaints(settings: RouterSettings, trust: Trust) -> list[str]:
    """About an address that other hosts reach."""
    listen = settings.listen
    if ipaddress.ip_address(listen.host).is_loopback:
        return []
    found = []
    if settings.tls is None:
        found.append(f"API keys can be read on the way to {listen}: --tls-cert talks TLS")
    if not _refuses(settings, trust.rules):
        found.append(
            f"whoever reaches {listen} may use the engines: a --trust file with unlisted and keyless "
            '"refuse" says who may'
        )
    return found


def _refuses(settings: RouterSettings, rules: Rules) -> bool:
    """Strangers: by their keys, or for want of a certificate."""
    return settings.tls_ca is not None or Unlisted.REFUSE is rules.unlisted is rules.keyless
