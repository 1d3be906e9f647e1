"""When things are due."""

from launch.deadlines_heap import DeadlineHeap, Timer


def test_timers_fire_in_order_and_once():
    heap, fired = DeadlineHeap(), []
    for when in (3.0, 1.0, 2.0):
        heap.add(when, lambda when=when: fired.append(when))
    assert heap.nearest() == 1.0
    heap.expire(2.0)
    assert fired == [1.0, 2.0]
    heap.expire(9.0)
    assert fired == [1.0, 2.0, 3.0]
    assert heap.nearest() is None


def test_a_cancelled_timer_never_fires_and_is_not_waited_for():
    heap, fired = DeadlineHeap(), []
    first = heap.add(1.0, lambda: fired.append(1))
    heap.add(2.0, lambda: fired.append(2))
    heap.cancel(first)
    heap.cancel(first)
    assert (heap.nearest(), len(heap)) == (2.0, 1)
    heap.expire(5.0)
    assert fired == [2]
    heap.cancel(first)
    heap.cancel(Timer(0.0, None))
    assert len(heap) == 0


def test_a_timer_may_cancel_and_add_others():
    heap, fired = DeadlineHeap(), []
    later = heap.add(2.0, lambda: fired.append("later"))

    def act():
        heap.cancel(later)
        heap.add(0.5, lambda: fired.append("added"))

    heap.add(1.0, act)
    heap.expire(3.0)
    assert fired == ["added"]


def test_thousands_of_answered_requests_leave_nothing_behind():
    heap = DeadlineHeap()
    kept = heap.add(1e9, lambda: None)
    for number in range(10_000):
        heap.cancel(heap.add(1e6 + number, lambda: None))
    assert len(heap) == 1
    assert len(heap._heap) < 200
    assert heap.nearest() == kept.when
