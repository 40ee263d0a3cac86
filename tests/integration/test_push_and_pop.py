"""Messages go in and come out: once, in order, as they were."""

from tests.api import Api


async def test_a_pushed_message_is_popped_as_it_was(api: Api) -> None:
    (result,) = await api.push("orders", {"n": 1}, ids=["t-1"])
    assert result["status"] == "queued"
    (message,) = await api.pop("orders")
    assert message["data"] == {"n": 1}
    assert message["transactionId"] == "t-1"
    assert message["id"] == result["message_id"]


async def test_a_failed_message_in_the_middle_of_a_batch_is_redelivered_first(api: Api) -> None:
    await api.push("jobs", 1, 2, 3)
    messages = await api.pop("jobs", batch=3)
    results = await api.ack(messages, ["completed", "failed", "completed"])
    assert [result["success"] for result in results] == [True, True, False]
    again = await api.pop("jobs", batch=3, wait=True, timeout=5000)
    assert [message["data"] for message in again] == [2, 3]
