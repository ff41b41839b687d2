"""Completions and adapters on a server: the requests, the results, and the errors that a user sees."""

import contextlib
import socket
import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import numpy as np
import pytest
from completion_server import CompletionServer

from jaxtune.errors import UserError
from jaxtune.rollout import server_request
from jaxtune.rollout.completion_server import Completion, complete
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.rollout.server_request import PAUSES
from jaxtune.rollout.server_scores import score_prompts
from jaxtune.rollout.server_weights import send_adapter, send_weights

STOP = 2


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server():
    with CompletionServer(lambda prompt, seed: [prompt[-1] + 1, prompt[-1] + 2, STOP, 9]) as server:
        yield server


def ask(server, prompts, **changed):
    servers = server if isinstance(server, ServerPool) else ServerPool([getattr(server, "url", server)])
    options = dict(max_tokens=8, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop={STOP})
    options |= dict(vocabulary=2**48, model="base", seed=0, timeout=10.0, wait=lambda seconds: None)
    return complete(servers, prompts=prompts, **({"numbers": range(len(prompts))} | options | changed))


@pytest.fixture
def adapter(tmp_path):
    """Return a function that writes an adapter's folder with the given weights."""

    def write(weights: bytes, name: str = "adapter"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return folder

    return write


def test_completions_are_in_the_order_of_the_prompts_with_the_stop_token(server):
    completions = ask(server, [[10 * n] for n in range(1, 50)])
    assert completions == [Completion([10 * n + 1, 10 * n + 2, STOP], finished=True) for n in range(1, 50)]


def test_a_completion_that_max_tokens_ends_is_not_finished(server):
    assert ask(server, [[10]], max_tokens=2) == [Completion([11, 12], finished=False)]


def test_log_probabilities_come_with_their_tokens(server):
    assert ask(server, [[10]], log_probs=True) == [Completion([11, 12, STOP], True, [-1.5] * 3)]
    assert "logprobs" in server.requests[-1][1]
    server.log_probs = float("-inf")
    assert np.isnan(ask(server, [[10]], log_probs=True)[0].log_probs).all()
    server.log_probs = None
    with pytest.raises(UserError, match="rollout.correction='none' trains without it"):
        ask(server, [[10]], log_probs=True)


def test_several_servers_share_the_prompts_and_a_dead_one_is_left_out(server, adapter, caplog):
    prompts = [[10 * n] for n in range(1, 9)]
    expected = ask(server, prompts)
    server.requests.clear()
    load = partial(send_adapter, name="run", folder=adapter(b"1"), wait=lambda seconds: None)
    with CompletionServer(server.script) as other:
        pool, dead = ServerPool([server.url, other.url]), other.url
        assert ask(pool, prompts) == expected
        assert len(server.requests) == len(other.requests) == 4
        assert len(set(pool.ask_each(load))) == 1 and server.adapters.keys() == other.adapters.keys() != set()
    assert ask(pool, prompts) == expected
    assert caplog.text.count(f"{dead}/v1/completions cannot be reached") == 1
    assert "this server is left out until the run ends, which has 1 server now" in caplog.text
    assert len(pool.ask_each(load)) == 1


def test_the_likeliest_tokens_come_by_their_rank(server):
    """With the prompt's own token, which a vLLM adds, in any order."""
    place = {"7": {"logprob": -9.0, "rank": 40}, "3": {"logprob": -2.0, "rank": 2}, "5": {"logprob": -1.0, "rank": 1}}
    server.prompt_log_probs = lambda prompt, most: [None, *[place] * (len(prompt) - 1)]
    found = score_prompts(ServerPool([server.url]), [[4, 7], [4, 7, 7]], 2, vocabulary=10, timeout=10)
    assert [tokens.tolist() for tokens, _ in found] == [[[5, 3]], [[5, 3], [5, 3]]]
    assert found[0][1].tolist() == [[-1, -2]]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "does not return the 1 likeliest tokens .prompt_logprobs. at each token"),
        ([None], "does not return the 1 likeliest tokens"),
        ([None, {}], "does not return the 1 likeliest tokens"),
        ([None, {"3": {"logprob": -1.0}}], "does not answer as an OpenAI-compatible server"),
        ([None, {"3": {"logprob": None, "rank": 1}}], "does not answer as an OpenAI-compatible server"),
        ([None, {"30": {"logprob": -1.0, "rank": 1}}], "returned tokens 30 to 30: the student has tokens 0 to 9"),
    ],
)
def test_scores_that_cannot_be_used_are_refused(server, said, message):
    server.prompt_log_probs = lambda prompt, most: said
    with pytest.raises(UserError, match=message):
        score_prompts(ServerPool([server.url]), [[4, 7]], 1, vocabulary=10, timeout=10)


def test_no_prompt_asks_for_nothing(server):
    assert ask(server, []) == []
    assert server.requests == []


def test_the_server_is_told_how_to_sample(server):
    ask(server, [[10, 11]], stop={7, 2})
    ((path, body),) = server.requests
    assert path == "/v1/completions"
    assert 0 <= body.pop("seed") < 2**53
    assert body == {
        "model": "base",
        "prompt": [[10, 11]],
        "n": 1,
        "return_token_ids": True,
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [2, 7],
    }


def test_a_group_differs_and_a_seed_gives_the_same_again(server):
    server.script = lambda prompt, seed: [seed]
    group = [completion.tokens[0] for completion in ask(server, [[10]] * 8, seed=3)]
    assert len(set(group)) == 8
    assert [completion.tokens[0] for completion in ask(server, [[10]] * 8, seed=3)] == group
    assert not set(group) & {completion.tokens[0] for completion in ask(server, [[10]] * 8, seed=4)}


def test_requests_are_under_way_together(server):
    together = threading.Barrier(4, timeout=10)

    def answer(*request):
        together.wait()
        return 200, {"choices": [{"token_ids": [5], "finish_reason": "stop"}]}

    server.answer = answer
    assert ask(server, [[10]] * 4) == [Completion([5], finished=True)] * 4


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_address_may_end_as_users_write_it(server, suffix):
    assert ask(server.url + suffix, [[10]])[0].finished


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", "http://localhost:port"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(UserError, match="is not the address of a server; use one like http://localhost:8000"):
        ask(url, [[10]])


def test_a_password_in_the_address_is_refused_and_not_shown():
    with pytest.raises(UserError, match=r"^'host:8000' is not the address of a server.*without a user"):
        ask("http://me:secret@host:8000", [[10]])


def test_the_key_is_sent_from_the_environment(server, monkeypatch):
    server.key = "secret"
    with pytest.raises(
        UserError, match="answers 401: Unauthorized; the key is taken from the environment variable OPENAI_API_KEY"
    ):
        ask(server, [[10]])
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    assert ask(server, [[10]])[0].finished


def test_a_key_that_no_header_can_hold_is_not_shown(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
    with pytest.raises(UserError, match="^OPENAI_API_KEY has characters that cannot be sent in a header$"):
        ask(server, [[10]])


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_longer_and_longer_pauses(server, status):
    server.failures, server.failure = 2, status
    pauses = []
    assert ask(server, [[10]], wait=pauses.append)[0].finished
    assert pauses == list(PAUSES[:2])


def test_a_server_that_stays_busy_is_said_with_its_words(server):
    server.failures = 100
    with pytest.raises(UserError, match=rf"answers 503: not now \(6 attempts in {sum(PAUSES):g} seconds\)"):
        ask(server, [[10]])


def test_a_server_that_is_not_there_is_said_with_the_attempts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        pauses = []
        with pytest.raises(UserError, match=rf"{url}/v1/completions cannot be reached: .*refused \(6 attempts in 31 s"):
            ask(url, [[10]], wait=pauses.append)
    assert pauses == list(PAUSES)


def test_a_server_that_takes_too_long_is_not_asked_again():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=r"v1/completions did not answer within 0\.05 seconds"):
            ask(url, [[10]], timeout=0.05, wait=lambda seconds: pytest.fail("asked again"))


@pytest.mark.parametrize("status", ["200 OK", "500 Error"])
@pytest.mark.parametrize(
    "begin, then, message",
    [
        ("HTTP/1.1 ", "2", "did not answer within 0.3 seconds"),
        ("HTTP/1.1 {status}\r\nX: ", "x", "did not answer within 0.3 seconds"),
        ("HTTP/1.1 {status}\r\nContent-Length: 1000\r\n\r\n", " ", "did not answer within 0.3 seconds"),
        ("HTTP/1.1 {status}\r\n\r\n", " " * 999, "answers with more than 5000 bytes"),
        ("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n", "1\r\n \r\n" * 999, "more than 5000 bytes"),
    ],
    ids=["status", "header", "body", "endless", "endless-chunks"],
)
def test_an_answer_has_limits_of_bytes_and_of_time_as_a_whole(status, begin, then, message, monkeypatch):
    """Each byte arrives well within the time limit of the whole answer."""
    monkeypatch.setattr(server_request, "MAX_BYTES", 5000)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle():
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):  # the client has gone
                connection.sendall(begin.format(status=status).encode())
                for _ in range(100):
                    connection.sendall(then.encode())
                    time.sleep(0.02)

        thread = threading.Thread(target=trickle)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=message):
            ask(url, [[10]], timeout=0.3, wait=lambda seconds: pytest.fail("asked again"))
        thread.join(10)


def test_an_answer_that_is_cut_off_is_asked_for_again(server):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def cut_off():
            for _ in range(6):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(2**16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(2**16):  # closed with unread bytes, it would be reset
                        pass

        threading.Thread(target=cut_off, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=r"IncompleteRead\(1 bytes read, 999 more expected\) \(6 attempts"):
            ask(url, [[10]])


@pytest.mark.parametrize(
    "answer, message",
    [
        ((400, {"error": {"message": "too long"}}), r"v1/completions answers 400: too long$"),
        ((400, {"object": "error", "message": "too long"}), r"answers 400: too long$"),
        ((422, {"detail": "Unprocessable"}), r"answers 422: Unprocessable$"),
        ((500, "<html>broken</html>"), r"answers 500: <html>broken</html>$"),
        ((200, "<html>hello</html>"), "does not answer as an OpenAI-compatible server: <html>hello"),
        ((200, {"choices": []}), "does not answer as an OpenAI-compatible server"),
        ((200, [1]), "does not answer as an OpenAI-compatible server"),
        ((200, {"choices": [{"token_ids": [1], "finish_reason": "abort"}]}), "with finish_reason='abort', which is"),
        ((200, {"choices": [{"token_ids": [5] * 9, "finish_reason": "stop"}]}), "returned 9 tokens; at most 8 were re"),
        ((200, {"choices": [{"token_ids": [1, -7], "finish_reason": "stop"}]}), "returned token -7: .* 0 to 99; does"),
        ((200, {"choices": [{"token_ids": [100], "finish_reason": "stop"}]}), "returned token 100: .* 0 to 99; does"),
        ((200, {"choices": [{"token_ids": [True], "finish_reason": "stop"}]}), "does not return the tokens"),
        ((200, "[" * 100_000), r"does not answer as an OpenAI-compatible server: \[\[\["),
        ((500, "[" * 100_000), r"answers 500: \[\[\["),
        ((500, {"error": "\x1b]0;you\x07\n"}), r"answers 500: \\x1b\]0;you\\x07\\n$"),
        ((200, "\x1b[2J"), r"as an OpenAI-compatible server: \\x1b\[2J$"),
    ],
    ids=["400", "400-old", "422", "500", "page", "no-choice", "list", "aborted"]
    + ["too-many", "negative", "beyond", "bool", "deep", "deep-500", "escapes-500", "escapes"],
)
def test_an_answer_that_is_no_completion_is_said_at_once(server, answer, message):
    server.answer = lambda *request: answer
    with pytest.raises(UserError, match=message):
        ask(server, [[10]], vocabulary=100, wait=lambda seconds: pytest.fail("asked again"))


def test_a_model_that_is_not_served_is_named(server):
    with pytest.raises(UserError, match="answers 404: The model `other` does not exist"):
        ask(server, [[10]], model="other")


def test_a_server_without_tokens_is_told_which_version_has_them(server):
    server.token_ids = False
    with pytest.raises(UserError, match=r"does not return the tokens .* vLLM does since version 0\.10\.2"):
        ask(server, [[10]])


def test_an_adapter_is_loaded_and_asked_for_by_its_name(server, adapter):
    folder = adapter(b"one")
    served = send_adapter(server.url, "run", folder)
    assert server.adapters == {served: str(folder.resolve())}
    assert ask(server, [[10]], model=served)[0].finished


def test_the_next_adapter_takes_the_place_of_the_earlier_and_has_another_name(server, adapter):
    server.adapters["run-two-0123456789ab"] = "another run's"
    server.adapters["run-mine"] = "the user's"
    first = send_adapter(server.url, "run", adapter(b"one"))
    second = send_adapter(server.url, "run", adapter(b"two"))
    assert first != second
    assert list(server.adapters) == ["run-two-0123456789ab", "run-mine", second]
    unloads = [place for place, (path, _) in enumerate(server.requests) if path == "/v1/unload_lora_adapter"]
    loads = [place for place, (path, _) in enumerate(server.requests) if path == "/v1/load_lora_adapter"]
    assert unloads == [loads[1] - 1]


def test_the_same_adapter_is_loaded_from_where_it_is_now(server, adapter):
    served = send_adapter(server.url, "run", adapter(b"one", "gone"))
    assert send_adapter(server.url, "run", adapter(b"one", "here")) == served
    assert server.adapters[served].endswith("here")


def test_an_earlier_adapter_that_has_just_gone_is_no_error(server, adapter):
    server.models.append("run-0123456789ab")  # listed, but not found when it is unloaded
    assert send_adapter(server.url, "run", adapter(b"one")) in server.adapters


def test_a_server_that_loads_no_adapters_is_told_how_to_start_it(server, adapter):
    server.updates = False
    with pytest.raises(UserError, match=r"answers 404: Not Found; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=Tr"):
        send_adapter(server.url, "run", adapter(b"one"))


def test_all_weights_are_loaded_and_prefixes_of_those_before_forgotten(server, tmp_path):
    """Requests then name no model, so that the server's own answers."""
    loaded, pauses = [], []
    server.weights, server.busy = loaded.append, 2
    send_weights(server.url + "/v1", tmp_path, timeout=10.0, wait=pauses.append)
    assert loaded == [str(tmp_path.resolve())] and pauses == list(PAUSES[:2])
    assert [path for path, _ in server.requests] == ["/collective_rpc", *["/reset_prefix_cache"] * 3]
    assert ask(server, [[10]], model=None)[0].finished


def test_a_server_that_others_use_is_not_sampled_with_their_prefixes(server, tmp_path):
    server.busy = 100
    with pytest.raises(UserError, match="does not forget the prefixes .* must serve only this run"):
        send_weights(server.url, tmp_path, timeout=10.0, wait=lambda seconds: None)


def test_a_server_that_loads_no_weights_is_told_how_to_start_it(server, tmp_path):
    server.weights = None
    with pytest.raises(UserError, match="collective_rpc answers 404: Not Found; .* start vLLM with VLLM_SERVER_DEV"):
        send_weights(server.url, tmp_path, timeout=10.0)


def test_nothing_waits_for_answers_of_servers_that_are_closed(server):
    """Neither for a request that is under way, nor for one that comes later."""
    asked, may_answer = threading.Event(), threading.Event()

    def script(prompt, seed):
        asked.set()
        may_answer.wait(timeout=60)
        return [5]

    server.script, pool = script, ServerPool([server.url])
    raised: list[BaseException] = []

    def wait_for_answer():
        try:
            ask(pool, [[10]])
        except CancelledError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait_for_answer)
    waiting.start()
    assert asked.wait(timeout=60)
    pool.close()
    waiting.join(timeout=60)
    assert len(raised) == 1
    may_answer.set()
    with pytest.raises(CancelledError):
        ask(pool, [[10]])


def test_a_folder_without_an_adapter_is_refused(server, tmp_path):
    with pytest.raises(UserError, match=r"is not an adapter's folder: adapter_config\.json: No such file"):
        send_adapter(server.url, "run", tmp_path)
    assert server.requests == []
