"""Who the members of a cluster are, and how one proves it to another.

    secret (a file) ──> a key pair for each member: router, worker, controller, operator
                          │  keys.py      derives them, signs and verifies
                          │  key_file.py  reads them from a file, again when it changes
                          ├─ proofs.py    a call's proof: who calls, whom, which method, when, and once only
                          └─ permits.py   a router's permit: which worker may have which KV of which other one

What checks a proof cannot make one: a process has the private key of its own member, and the public keys of all.
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
