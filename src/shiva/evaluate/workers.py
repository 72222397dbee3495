"""One process or several (`accelerate launch -m shiva eval …`): who makes what, and waiting for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from shiva.core.needs import install

T = TypeVar("T")


class Workers:
    """The processes of this evaluation; accelerate is asked only if there are several."""

    def __init__(self, device: str = "cpu") -> None:
        self.state: Any = None
        self.device = device
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import PartialState
            except ImportError as error:
                raise ImportError(f"several processes need accelerate: {install('metrics')}") from error
            # one process may have hours of images more than another
            self.state = PartialState(cpu=device == "cpu", timeout=timedelta(days=7))
            self.device = str(self.state.device)

    @property
    def main(self) -> bool:
        return self.state is None or bool(self.state.is_main_process)

    def share(self, work: Sequence[T]) -> list[T]:
        """This process's part of the work."""
        if self.state is None:
            return list(work)
        with self.state.split_between_processes(list(work)) as part:
            return list(part)

    def found_by_main(self, find: Callable[[], T]) -> T:
        """What the main process finds, in every process; what it raises, too."""
        if self.state is None:
            return find()
        from accelerate.utils import broadcast_object_list

        answer: list[Any] = [None, None]
        if self.main:
            try:
                answer[0] = find()
            except Exception as error:
                answer[1] = error
        found, failure = broadcast_object_list(answer)
        if failure is not None:
            raise failure
        return found

    def wait(self) -> None:
        if self.state is not None:
            self.state.wait_for_everyone()

    def close(self) -> None:
        if self.state is not None:
            self.state.destroy_process_group()
