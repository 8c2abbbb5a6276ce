"""Starts the processes of a job, supervises them, and leaves none behind.

Other folders use `child`, `config`, `crash_policy`, `entry`, `exporter`, `guard`, `joining.options`, `joining.run`,
`limits`, `local`, `output`, `places`, `plan`, `recording`, `rendezvous.detect`, `rendezvous.join`,
`rendezvous.liveness_lock`, `rendezvous.roles`, `rendezvous.roster`, `replaying`, `replicas`, `running`, `script`,
`script_exit`, `server`, `shares`, `signals`, `snapshots`, `successors`, `supervise`, `supervision`, `worker`.
"""
