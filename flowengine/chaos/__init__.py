"""The failure laboratory: harm on purpose, to see what survives."""

from .inject import at, cut, freeze, heal, kill, kill_head, kill_node, kill_worker, lose, plan, thaw

__all__ = ["at", "cut", "freeze", "heal", "kill", "kill_head", "kill_node", "kill_worker", "lose", "plan", "thaw"]
