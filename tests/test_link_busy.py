"""Peers that are there and do not answer: code that keeps the interpreter may take long."""

from __future__ import annotations

import os
import signal

from tests.test_link import Child, Note, Party, on_loop

SETTINGS = {"ping_every_s": 0.05, "silent_after_s": 0.3, "lost_after_s": 0.3}


@on_loop
async def test_a_process_that_runs_code_of_programs_may_stand_still_for_long() -> None:
    with Child("runs_code=True") as child:
        async with Party(**SETTINGS) as a:
            a.endpoint.send(child.address, Note(1))
            await a.until(lambda: a.got)
            looked = []
            stands_still = a.endpoint._stands_still

            async def noted(peer: str) -> bool:
                looked.append(await stands_still(peer))
                a.changed.set()
                return looked[-1]

            a.endpoint._stands_still = noted  # type: ignore[method-assign]
            os.kill(child.process.pid, signal.SIGSTOP)
            a.endpoint.send(child.address, Note(2))
            await a.until(lambda: len(looked) == 2)
            os.kill(child.process.pid, signal.SIGCONT)
            await a.until(lambda: len(a.got) == 2)
            assert looked == [True, True]
            assert not a.lost


@on_loop
async def test_one_that_stood_still_and_is_dead_is_lost() -> None:
    with Child("runs_code=True") as child:
        async with Party(**SETTINGS) as a:
            a.endpoint.send(child.address, Note(1))
            await a.until(lambda: a.got)
            os.kill(child.process.pid, signal.SIGSTOP)
            child.process.kill()
            await a.until(lambda: a.lost)
