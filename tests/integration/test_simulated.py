"""The whole system at the pace of a GPU that is not there."""

from tests.gpu_worker.hf import smollm2_or_skip
from tests.integration.system import running


def test_a_simulated_system_streams_whole_words_that_a_seed_decides() -> None:
    smollm2_or_skip()
    with running("--device", "simulated", "--profile", "h200-smollm2") as system:
        texts = []
        for seed in (3, 3, 4):
            events = list(
                system.stream(prompt="Hello", max_tokens=24, seed=seed, stream_options={"include_usage": True})
            )
            pieces = [event["choices"][0]["text"] for event in events if event["choices"]]
            assert events[-1]["usage"]["completion_tokens"] == 24
            words = "".join(pieces).split()
            assert len(words) == 24, "each token is a word of its own, and none ends the stream"
            texts.append(words)
        assert texts[0] == texts[1] != texts[2]
        assert system.metric("worker", "legato_worker_simulated_lateness_seconds_count") > 0
        system.wait_idle()
