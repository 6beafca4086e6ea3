"""Requests drawn from the OpenAPI schema, valid and invalid: the server never answers with a 500."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from running import in_thread
from schemathesis import GenerationMode

import shallowdraft as sd


@pytest.mark.slow
def test_no_request_breaks_the_server():
    target = sd.load("zoo:target", device="cpu")
    target.require_tokenizer().chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    statuses: list[int] = []
    with in_thread(target, None, max_model_len=64, max_prompt_tokens=60, max_new_tokens=8) as (_, url):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [operation.ok() for operation in schema.get_all_operations()]
        for operation in operations:
            for mode in GenerationMode if operation.method == "post" else ():  # the others have no body

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=100,
                    deadline=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate],
                )
                def send(case):
                    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                        case.body["model"] = "zoo:target"
                    answer = case.call()
                    assert answer.status_code < 500, (answer.text, case.body)
                    statuses.append(answer.status_code)

                send()
    assert {200, 400} <= set(statuses)
