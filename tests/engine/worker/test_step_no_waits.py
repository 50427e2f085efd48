"""A whole step, from its plan to launched tokens, does not wait for the device."""

from __future__ import annotations

import pkgutil

import numpy as np
import pytest

from octavo.core.messages import LogitMasks
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.logits_processors import PROVIDERS
from octavo.testing.conformance.device import asynchronous_device, waiting_allowed

PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    "logprobs": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1),
    "edited": SamplingParams(
        temperature=0,
        logit_bias={3: 1.0},
        repetition_penalty=1.1,
        presence_penalty=0.3,
        bad_words_token_ids=[[4], [5, 6]],
        allowed_token_ids=list(range(90)),
        min_tokens=2,
        stop_token_ids=[9],
    ),
}


def made(tiny_llama, device):
    def processor(provider):
        return lambda context: pkgutil.resolve_name(provider.factory)(None, context)

    with waiting_allowed():
        runner = tiny_llama.runner(
            device=device, processors=[processor(each) for each in PROVIDERS], poison=False
        )
        runner.load()
        runner.allocate_kv(16 * 16 + 1, 8)
    return runner


@pytest.mark.parametrize("params", list(PARAMS))
def test_steps_are_launched_ahead(tiny_llama, driver, params):
    """Prompts, a chunk beside decodes, decodes alone; each launched before the last is finished."""
    with asynchronous_device() as device:
        runner, unfinished = made(tiny_llama, device), []

        def launch(counts, masks=None):
            plan = driver.plan(counts)
            runner.forward(plan)
            unfinished.append(runner.launch(masks))
            for slot in plan.slots[plan.sample_rows].tolist():
                driver.known[slot].append(-1)  # known one step later

        for slot, length in ((2, 11), (0, 5)):
            driver.admit(slot, list(range(length)), params=PARAMS[params])
        launch({2: 11, 0: 5})
        driver.admit(1, list(range(9)), params=PARAMS[params])
        launch({2: 1, 0: 1, 1: 4})
        unfinished.pop(0)()
        launch({2: 1, 0: 1, 1: 5})
        unfinished.pop(0)()
        forbidden = np.full((1, 4), -2, np.int32)
        launch({2: 1, 0: 1, 1: 1}, LogitMasks(rows=np.array([1], np.int32), bitmask=forbidden))
        driver.release(0)
        launch({2: 1, 1: 1})
        results = [finish() for finish in unfinished]
        runner.close()
    assert [len(result.token_ids) for result in results] == [3, 3, 2]
