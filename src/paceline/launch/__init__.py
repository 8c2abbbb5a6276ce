"""Starts the processes of a job, supervises them, and leaves none behind.

Other folders use `child`, `config`, `entry`, `guard`, `limits`, `local`, `output`, `places`, `plan`, `policy`,
`rendezvous.detect`, `rendezvous.join`, `rendezvous.liveness_lock`, `rendezvous.roster`, `running`, `script`,
`script_exit`, `server`, `shares`, `signals`, `successors`, `supervise`, `worker`.
"""
