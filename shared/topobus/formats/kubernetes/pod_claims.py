"""Checks a pod's claim entries: each names one claim or one template, and containers refer to
entries that exist.

Source: pkg/apis/core/validation (ValidatePodResourceClaims), 1.36.
"""

from __future__ import annotations

from collections.abc import Iterator

from topobus.formats.kubernetes.pod import PodSpec
from topobus.formats.kubernetes.shape import Problem, did_you_mean
from topobus.values.names import is_dns_label, is_dns_subdomain

__all__ = ["check_pod_claims"]


def check_pod_claims(spec: PodSpec, *, is_grouped: bool = False) -> list[Problem]:
    """Check `resourceClaims` and the containers' use of them.

    Shapes: is_grouped — an entry may get its claim from the pod's group (`podGroupResourceClaim`),
    so that it may name none itself.

    >>> [str(problem) for problem in check_pod_claims(PodSpec())]
    []
    """
    return [*_entries(spec, is_grouped=is_grouped), *_uses(spec)]


def _entries(spec: PodSpec, *, is_grouped: bool) -> Iterator[Problem]:
    names = [resource_claim.name for resource_claim in spec.resource_claims]
    for index, resource_claim in enumerate(spec.resource_claims):
        path = f"spec.resourceClaims[{index}]"
        if not is_dns_label(resource_claim.name):
            yield Problem(
                f"{path}.name", f"got {resource_claim.name!r}, wanted a DNS label: lower-case letters, digits and '-'"
            )
        if resource_claim.name in names[:index]:
            yield Problem(f"{path}.name", f"{resource_claim.name!r} is here twice")
        named = [name for name in (resource_claim.claim_name, resource_claim.template_name) if name]
        if len(named) != 1 and not (is_grouped and not named):
            yield Problem(
                path, f"got {len(named)} of resourceClaimName and resourceClaimTemplateName, wanted exactly one"
            )
        for name in named:
            if not is_dns_subdomain(name):
                yield Problem(path, f"got {name!r}, wanted a DNS name: lower-case letters, digits, '-' and '.'")


def _uses(spec: PodSpec) -> Iterator[Problem]:
    names = sorted({resource_claim.name for resource_claim in spec.resource_claims})
    for part, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for place, container in enumerate(containers):
            seen: set[tuple[str, str]] = set()
            for index, use in enumerate(container.resources.claims):
                path = f"spec.{part}[{place}].resources.claims[{index}]"
                if use.name not in names:
                    claims_text = (
                        f"the pod's are {', '.join(names)}" if names else "the pod has none in spec.resourceClaims"
                    )
                    yield Problem(
                        f"{path}.name", f"there is no claim {use.name!r}: {claims_text}{did_you_mean(use.name, names)}"
                    )
                elif (use.name, use.request) in seen or (use.request and (use.name, "") in seen):
                    yield Problem(path, f"{use.name!r} is used here already")
                seen.add((use.name, use.request))
