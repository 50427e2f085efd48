"""Requests that schemathesis makes of /openapi.json: no 500, no dead engine, and answers that are
what the document says."""

from __future__ import annotations

import hypothesis
import pytest

from octavo.server.app.routes import OPERATIONS

schemathesis = pytest.importorskip("schemathesis")

ROUTES = [(operation.path.replace(":path", ""), operation.method) for operation in OPERATIONS]
QUICK = {"/v1/chat/completions": 8, "/v1/completions": 12, "/tokenize": 8, "/detokenize": 10}
"""Examples of each kind, valid and not; 5 of the others."""


@pytest.fixture(scope="module")
def schema(real_server):
    return schemathesis.openapi.from_url(f"{real_server.url}/openapi.json")


def fuzz(schema, server, path, method, examples):
    """So many valid requests, and so many that are not."""
    operation = schema[path][method]
    checks = schemathesis.specs.openapi.checks
    wanted = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    for mode in schemathesis.GenerationMode:
        if mode.value == "negative" and not operation.body:
            continue

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            case.validate_response(case.call(timeout=60), checks=wanted)

        run()
        server.check_control()


@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_generated_requests(schema, real_server, path, method):
    fuzz(schema, real_server, path, method, QUICK.get(path, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), [(p, m) for p, m in ROUTES if p in QUICK])
def test_many_generated_requests(schema, real_server, path, method):
    fuzz(schema, real_server, path, method, 60)


def test_no_block_is_lost(real_server):
    real_server.idle()
