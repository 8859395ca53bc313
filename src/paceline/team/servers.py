"""Parameter servers among the seats: their numbers are beyond those of workers, and no roster has them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.team.commands import At
from paceline.team.seats import Said, Seat
from paceline.world import SERVERS


def seat_servers(seats: dict[int, Seat], agent: str, told: Mapping[int, Said]) -> bool:
    """Seats for the parameter servers that an agent's workers want, on its host; whether any is new."""
    wanted = range(SERVERS, SERVERS + max((said.servers for said in told.values()), default=0))
    new = [number for number in wanted if number not in seats]
    # To a coordinator that was started again they may be new in a later life.
    seats |= {n: Seat(agent, told[n].life if n in told else 0, newcomer=True) for n in new}
    return bool(new)


def serving(seats: Mapping[int, Seat]) -> dict[int, At]:
    """Where the parameter servers are reached, by their numbers."""
    at = {n - SERVERS: seat.said.at for n, seat in sorted(seats.items()) if n >= SERVERS and seat.alive}
    return {number: where for number, where in at.items() if where is not None}


def can_go_back(seats: Mapping[int, Seat], first: Sequence[int]) -> bool:
    """Whether all can begin anew, as the workers of the `first` generation did, who meet in one agent."""
    return len({seat.agent for seat in seats.values()}) == 1 and [*first] == [*range(len(first))]
