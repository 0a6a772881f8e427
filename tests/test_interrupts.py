"""Signals are collected, and a second one is obeyed wherever the program is."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from meka.lab.interrupts import collected

# The main thread is in C for minutes, without the interpreter's lock.
BUSY = """
import hashlib
from meka.lab.interrupts import collected
with collected(second_ends=True):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
"""


@pytest.mark.fault(15)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_even_inside_compiled_code(number, tried):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    finally:
        process.kill()
        process.communicate()
    tried(second_interrupts=1)


def test_handlers_and_descriptors_are_put_back():
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    for second_ends in (False, True):
        with collected(second_ends=second_ends) as received:
            signal.raise_signal(signal.SIGINT)
            assert received == [signal.SIGINT]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    previous = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(previous)
    assert previous == -1
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


def test_outside_the_main_thread_nothing_is_collected():
    found = []

    def inside() -> None:
        with collected(second_ends=True) as received:
            found.append(received)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [[]]
