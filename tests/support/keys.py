"""Fresh key pairs for tests, and keyrings that know each other."""

from protocol.keyring import Keyring
from protocol.keys import ALLOWED, PAIR_SUFFIX, ROLES, KeyPair, allowed_line, encode_pair
from protocol.sockets import new_curve_keys


def fresh_pair(role) -> KeyPair:
    return KeyPair(role, *new_curve_keys())


PAIRS = {role: fresh_pair(role) for role in ROLES}


def keyring(role, **instead):
    """What `role` has in a proper set-up; `instead` replaces what it knows of others."""
    pairs = {**PAIRS, **instead}
    return Keyring(PAIRS[role], {pairs[other].public: other for other in ROLES if other != role})


def stranger():
    """A pair that nobody knows, with all the right public keys."""
    return Keyring(fresh_pair("supervisor"), {pair.public: pair.role for pair in PAIRS.values()})


def write_keys(folder, role, pair=None, **options):
    """The folder that `role` reads its keyring from, with another pair if given; returns it."""
    folder.mkdir(mode=0o700, parents=True, **options)
    secret = folder / f"{role}{PAIR_SUFFIX}"
    secret.touch(mode=0o600)
    secret.write_bytes(encode_pair(pair or PAIRS[role]))
    others = [pair for pair in PAIRS.values() if pair.role != role]
    (folder / ALLOWED).write_bytes(b"".join(allowed_line(p.role, p.public) for p in others))
    return folder
