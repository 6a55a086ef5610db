"""The boards of Grafana, one module each: what a person asks, and the query that answers it."""

from hack.observe.boards.engine import ENGINE
from hack.observe.boards.fleet import FLEET
from hack.observe.boards.pool import POOL

BOARDS = (FLEET, POOL, ENGINE)
