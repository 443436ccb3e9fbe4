"""What a message says of a configuration."""

import pytest

from flowalign.errors import ConfigError, hide


@pytest.mark.parametrize(
    "text",
    [
        "judge: {'url': 'http://judge/v1', 'api_key': 'hunter2'}",
        '{"token": "hunter2", "model": "tiny"}',
        "api-key=hunter2",
        "password: hunter2, model: tiny",
        "wandb: sk-hunter2hunter2",
        "http://me:hunter2@judge:8000/v1 and https://hunter2@judge",
        "Authorization: hunter2",
    ],
)
def test_secrets_are_never_said(text):
    assert "hunter2" not in str(ConfigError(text)) and "***" in hide(text)


@pytest.mark.parametrize(
    "text",
    [
        "token_variable: the environment has no 'NO_TOKEN'",
        "unknown key 'max_tokens'; did you mean 'max_new_tokens'?",
        "rewards.0: 'par' has no 'reference_score'; key: reference",
        "http://127.0.0.1:8000/v1 refused with status 401",
        "no model at hf_model; a task-key of its own",
    ],
)
def test_everything_else_is(text):
    assert hide(text) == text
