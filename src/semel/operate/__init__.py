"""What operators ask and do, as functions with plain answers: the commands are made of these.

    status_of, history_of            who owns each scope, where it stands, what happened
    diagnose                         what is stranded, with evidence, and what to read about it
    guarantee_of                     what happens once, and which settings weaken it
    plan_recovery, recover           settle what an earlier owner left
    cycles_to_verify, verify         rows staged against rows visible
    plan_adoption, adopt             go on with a checkpoint that does not follow from the ledger
    plan_resolution, resolve         carry a stuck cycle through

A function that only asks changes nothing; one that acts takes *who* and *why*, and the ledger
keeps them.  Nothing here prints.  `Pipeline.of(driver)` says which sinks are asked.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.operate.adoption import Adoption, AdoptionPlan, adopt, plan_adoption
    from semel.operate.doctor import Diagnosis, Patient, diagnose
    from semel.operate.guarantee import PipelineGuarantee, guarantee_of
    from semel.operate.pipelines import Pipeline
    from semel.operate.recovery import Recovered, RecoveryPlan, plan_recovery, recover
    from semel.operate.resolution import (
        Choice,
        Resolution,
        ResolutionPlan,
        Way,
        plan_resolution,
        resolve,
    )
    from semel.operate.status import Files, History, Status, history_of, status_of
    from semel.operate.verification import Verification, cycles_to_verify, verify

__all__ = [
    "Adoption",
    "AdoptionPlan",
    "Choice",
    "Diagnosis",
    "Files",
    "History",
    "Patient",
    "Pipeline",
    "PipelineGuarantee",
    "Recovered",
    "RecoveryPlan",
    "Resolution",
    "ResolutionPlan",
    "Status",
    "Verification",
    "Way",
    "adopt",
    "cycles_to_verify",
    "diagnose",
    "guarantee_of",
    "history_of",
    "plan_adoption",
    "plan_recovery",
    "plan_resolution",
    "recover",
    "resolve",
    "status_of",
    "verify",
]

__getattr__ = lazily(
    __name__,
    {
        "Adoption": "semel.operate.adoption",
        "AdoptionPlan": "semel.operate.adoption",
        "Choice": "semel.operate.resolution",
        "Diagnosis": "semel.operate.doctor",
        "Files": "semel.operate.status",
        "History": "semel.operate.status",
        "Patient": "semel.operate.doctor",
        "Pipeline": "semel.operate.pipelines",
        "PipelineGuarantee": "semel.operate.guarantee",
        "Recovered": "semel.operate.recovery",
        "RecoveryPlan": "semel.operate.recovery",
        "Resolution": "semel.operate.resolution",
        "ResolutionPlan": "semel.operate.resolution",
        "Status": "semel.operate.status",
        "Verification": "semel.operate.verification",
        "Way": "semel.operate.resolution",
        "adopt": "semel.operate.adoption",
        "cycles_to_verify": "semel.operate.verification",
        "diagnose": "semel.operate.doctor",
        "guarantee_of": "semel.operate.guarantee",
        "history_of": "semel.operate.status",
        "plan_adoption": "semel.operate.adoption",
        "plan_recovery": "semel.operate.recovery",
        "plan_resolution": "semel.operate.resolution",
        "recover": "semel.operate.recovery",
        "resolve": "semel.operate.resolution",
        "status_of": "semel.operate.status",
        "verify": "semel.operate.verification",
    },
)
