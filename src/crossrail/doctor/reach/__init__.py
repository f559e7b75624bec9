"""`doctor --listen` and `doctor --peer`: can two machines reach each other, by which rails, how fast?

Plain Python sockets, so that it works where the native module does not. Nobody is authenticated: the listening side
answers only small bounded requests, reveals nothing but its addresses, interface names, MTUs, speeds and version, and
ends by itself.

    wire.py      the frames             rails.py    addresses of this machine
    listen.py    one side               measure.py  the other: connects and measures
    verdict.py   what the figures mean  show.py     table and JSON
"""
