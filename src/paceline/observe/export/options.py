"""Options of `paceline run` about trackers and metrics. Light, as the command line imports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Where what a run reports goes.

    Parameters
    ----------
    log
        Trackers that get what the script reports: tensorboard[:DIR], wandb[:PROJECT], mlflow[:EXPERIMENT],
        trackio[:PROJECT], and otlp[:URL] for OpenTelemetry; several are joined by commas.
    metrics
        Port at which Prometheus scrapes /metrics, on this machine, or HOST:PORT.
    """

    log: str | None = None
    metrics: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anything is asked for."""
        return self.log is not None or self.metrics is not None
