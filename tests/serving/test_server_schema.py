"""Whatever a client sends that the schema allows, or does not: the server never answers with a 500."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from running import in_thread

import shallowdraft as sd


@pytest.fixture(scope="module")
def schema():
    target = sd.load("zoo:target", device="cpu")
    target.require_tokenizer().chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with in_thread(target, None, longest=64, prompt_tokens=60, tokens=8) as (_, url):
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


operations = schemathesis.pytest.from_fixture("schema")


@pytest.mark.slow
@operations.parametrize()
@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
def test_no_request_breaks_the_server(case):
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "zoo:target"
    case.call_and_validate(checks=[schemathesis.checks.not_a_server_error])
