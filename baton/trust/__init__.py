"""Identities of a cluster's members, and proofs of them.

    secret (a file) ──> a key pair for each member: router, worker, controller, operator
                          │  keys.py      derives them, signs and verifies
                          │  key_file.py  reads them from a file, again when it changes
                          ├─ proofs.py    proof of a call: caller, callee, method, time, valid once
                          └─ permits.py   permit of a router: one worker may read certain KV of another one

A verifier of proofs cannot create them: a process has the private key of its own member, and the public keys of all.
"""

from baton.trust.key_file import KeyFile, open_keys, read_private, write_private
from baton.trust.keys import KeyRing, Principal, draw_secret, load_keys, member_file
from baton.trust.permits import PERMIT_S, Party, Permit, check_permit, keys_digest, open_permit
from baton.trust.proofs import ProofBook, prove

__all__ = [
    "PERMIT_S",
    "KeyFile",
    "KeyRing",
    "Party",
    "Permit",
    "Principal",
    "ProofBook",
    "check_permit",
    "draw_secret",
    "keys_digest",
    "load_keys",
    "member_file",
    "open_keys",
    "open_permit",
    "prove",
    "read_private",
    "write_private",
]
