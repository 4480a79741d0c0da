"""Outputs are plain data: they cross a process border as they are."""

import pickle

from cbatch.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_outputs_pickle():
    output = RequestOutput(
        request_id="a",
        prompt="Hello",
        prompt_token_ids=[1, 2],
        outputs=[CompletionOutput(0, " you", [3], "stop", 4, -0.5, [{3: Logprob(-0.5, 1, " you")}])],
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0, num_preemptions=2),
    )
    assert pickle.loads(pickle.dumps(output)) == output


def test_completion_is_finished_once_it_has_a_reason():
    assert not CompletionOutput(0, "", []).finished
    assert CompletionOutput(0, "", [], "length").finished
