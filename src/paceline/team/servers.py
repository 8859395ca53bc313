"""Parameter servers among the seats: their numbers are beyond those of workers, and no roster has them. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.mesh import holders
from paceline.observe.figures import ranks
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


def held_elsewhere(seats: Mapping[int, Seat], lost: Collection[int]) -> str:
    """Who has what these parameter servers kept, in words; nothing where a part of any of them is nobody's."""
    count = max((seat.said.servers for seat in seats.values()), default=0)
    copies = max((seat.said.copies for seat in seats.values()), default=0)
    have = {n for n, seat in seats.items() if seat.alive and seat.said.holds and n not in lost}
    found = [[SERVERS + n for n in holders(part, count, copies) if SERVERS + n in have] for part in range(count)]
    if not copies or not all(found):
        return ""
    those = {found[number - SERVERS][0] for number in lost}
    what = "a copy of what it" if len(lost) == 1 else "copies of what they"
    return f"{ranks(those)} {'has' if len(those) == 1 else 'have'} {what} kept"


def unheld(said: Mapping[int, Said]) -> set[int]:
    """The parameter servers that have not got back what others have."""
    servers = {number for number in said if number >= SERVERS}
    have = {number for number in servers if said[number].holds}
    return servers - have if have else set()


def can_go_back(seats: Mapping[int, Seat], first: Sequence[int]) -> bool:
    """Whether all can begin anew, as the workers of the `first` generation did, who meet in one agent."""
    return len({seat.agent for seat in seats.values()}) == 1 and [*first] == [*range(len(first))]
