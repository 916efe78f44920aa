"""The operator of clusters under test that have tenants: who asks for their status and their metrics."""

from __future__ import annotations

import hashlib

OPERATOR_KEY = "key-of-operations"
_HASH = hashlib.sha256(OPERATOR_KEY.encode()).hexdigest()
OPERATOR_ENTRY = f"\noperations: {{key_sha256: ['{_HASH}'], operator: true}}\n"
"""The operator's entry in a tenants' file."""
