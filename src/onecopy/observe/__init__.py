"""What training does and holds, written down: collectives, times and bytes. Imports nothing of onecopy.

Take from here: `Ledger` (collectives), `Timeline` (when they ran), `Meter` (live bytes), `Category` and its kin.
"""
