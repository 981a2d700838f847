"""Examples of each command: a title, and its command line.

A test parses every line, and requires one of each command. Only the standard library: help is
printed before anything else is imported.
"""

from __future__ import annotations

__all__ = ["EXAMPLES"]

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "allocate": (
        ("Where a claim would go now, or why it would not", "topobus allocate -f examples/claims/gpu-nic-pair.yaml"),
        ("The same against a cluster", "topobus allocate -f claim.yaml --cluster --kube-context test"),
    ),
    "apply": (
        (
            "Store the example classes, then a claim for a GPU and a NIC close to it",
            "topobus apply -f examples/claims/classes.yaml",
        ),
        ("Several files; do not wait for the controller", "topobus apply -f classes.yaml -f claims.yaml --no-wait"),
        ("A kustomization, built by kustomize or kubectl", "topobus apply -k claims/test"),
    ),
    "completion": (
        ("For this bash", "source <(topobus completion bash)"),
        ("For every zsh", "topobus completion zsh > ~/.zfunc/_topobus"),
        ("For every fish", "topobus completion fish > ~/.config/fish/completions/topobus.fish"),
    ),
    "console": (
        ("The fleet in a browser, at http://127.0.0.1:8765/", "topobus console"),
        ("At another port", "topobus console --port 9000"),
    ),
    "context add": (
        (
            "Name a system that runs elsewhere",
            "topobus context add prod --nats tls://nats.example.org:4222 --user cli --password-file ~/cli.password",
        ),
    ),
    "context ls": (("Which systems this user knows, and which of them run", "topobus context ls"),),
    "context rm": (("Remove two; their systems keep running", "topobus context rm lab old"),),
    "context show": (("Where commands go now, and by which login", "topobus context show"),),
    "context use": (("Have all commands use the system of `topobus up --dir ~/lab`", "topobus context use lab"),),
    "decisions": (
        ("The last ten", "topobus decisions --limit 10"),
        ("Each as it is made", "topobus decisions --follow"),
    ),
    "delete": (
        ("Delete a pod; its devices are released first", "topobus delete pod trainer"),
        ("All that a file holds", "topobus delete -f examples/claims/gpu-nic-pair.yaml"),
    ),
    "demo": (("See everything in under a minute; nothing is left behind", "topobus demo"),),
    "describe": (
        ("Why a claim waits, and what would fit", "topobus describe claim pair"),
        ("A pod of another namespace", "topobus describe pod trainer -n research"),
    ),
    "device burn-in": (("Test a GPU before it is returned", "topobus device burn-in gpu-0000-18-00-0"),),
    "device exclude": (
        ("Exclude this GPU from all lists", "topobus device exclude gpu-0000-18-00-0 --why 'ECC errors, ticket 812'"),
    ),
    "device forgive": (
        ("Mark a fault as repaired that does not end by itself", "topobus device forgive gpu-0000-18-00-0"),
    ),
    "device report": (
        (
            "Pass on what another program sees",
            "topobus device report gpu-0000-18-00-0 --source dcgm --state unhealthy --code XID-79",
        ),
    ),
    "device list": (("What is withheld: by whom, why, since when", "topobus device list"),),
    "device maintain": (
        (
            "Withhold all FPGAs of a node, and evict the pods that use them",
            "topobus device maintain --class fpga --node n1 --why firmware --drain",
        ),
    ),
    "device rebind": (("Start a NIC's kernel driver on it again", "topobus device rebind nic-0000-3b-00-0"),),
    "device reset": (("Reset a GPU that no pod or claim holds", "topobus device reset gpu-0000-18-00-0"),),
    "device return": (("Offer it again", "topobus device return gpu-0000-18-00-0"),),
    "diff": (
        ("What apply would change; exit code 1 if anything", "topobus diff -f examples/claims/classes.yaml"),
        ("The same for a kustomization", "topobus diff -k claims/test"),
    ),
    "doctor": (
        ("Check the selected system", "topobus doctor"),
        ("Another one, one node of it", "topobus doctor --context prod --node n1"),
        ("What is wrong, in a large fleet", "topobus doctor --problems"),
        ("How a node differs from its recorded type", "topobus doctor --node n1 --machine my-server"),
    ),
    "explain": (
        ("Explain one of `topobus decisions`", "topobus explain d-51e9c9e7756afd750d3e"),
        ("One that `simulate --decisions` wrote", "topobus explain --file decisions/0001.json"),
    ),
    "forget node": (
        ("What would be removed of a node that was taken away", "topobus forget node n38 --dry-run"),
        ("Remove it", "topobus forget node n38"),
        ("All that somebody made up", "topobus forget node --without-machine"),
    ),
    "get": (
        ("All claims of all namespaces", "topobus get claims -A"),
        ("One pod as YAML", "topobus get pod trainer -o yaml"),
        ("Names alone, for a script", "topobus get claims,pods -o name"),
        ("What classic DRA drivers kept of a node", "topobus get nodeallocationstates n1"),
    ),
    "health": (("Devices that are not well", "topobus health"), ("All NICs", "topobus health --class nic --all")),
    "health watch": (("Each change from now on, as one JSON object per line", "topobus health watch --json"),),
    "help": (("The same as `topobus keys make --help`", "topobus help keys make"),),
    "holders": (
        ("What each pod and claim holds, over all nodes", "topobus holders"),
        ("What the pods of a namespace hold on one node", "topobus holders --node n1 -n train"),
    ),
    "hints watch": (("Each hint list from now on, as one JSON object per line", "topobus hints watch --json"),),
    "inventory": (
        ("How many devices of which class, and how many are free", "topobus inventory"),
        ("Each GPU", "topobus inventory gpu"),
    ),
    "keys certify": (
        (
            "A certificate for nats.example.org, by an authority made on the spot",
            "topobus keys certify tls --name nats.example.org",
        ),
    ),
    "keys forget": (
        ("End the passwords from before `keys rotate --overlap`", "topobus keys forget users --server-file users.conf"),
    ),
    "keys make": (
        (
            "Passwords of all users, and the file that nats-server includes",
            "topobus keys make users --server-file users.conf",
        ),
    ),
    "keys rotate": (
        (
            "Newer passwords of two users, the older ones good for now",
            "topobus keys rotate users gpu cli --overlap --server-file users.conf",
        ),
    ),
    "keys secrets forget": (("End the passwords from before a rotation", "topobus keys secrets forget topobus"),),
    "keys secrets make": (("What deploy/kubernetes needs, as Secrets", "topobus keys secrets make topobus"),),
    "keys secrets renew": (
        ("Another certificate of NATS by the same authority", "topobus keys secrets renew topobus"),
    ),
    "keys secrets rotate": (("Newer passwords for everybody", "topobus keys secrets rotate topobus --overlap"),),
    "keys secrets show": (
        ("The password of the operator's user, for a file", "topobus keys secrets show topobus cli"),
    ),
    "keys show": (
        ("One user's password", "topobus keys show users cli"),
        ("Until when a certificate is good", "topobus keys show tls"),
    ),
    "machine": (
        ("Draw the node with who holds what", "topobus machine"),
        ("This machine, without any server", "topobus machine --root /"),
        ("A node of a cluster, as a picture too", "topobus machine --node n1 --svg n1.svg"),
    ),
    "migrate": (("Structured manifests from classic ones", "topobus migrate claims.yaml parameters.yaml"),),
    "move-ledger": (
        ("To the node's own NATS server, its services stopped", "topobus move-ledger n1 --to nats://n1:4222"),
    ),
    "oci": (
        ("What a pod's container would get", "topobus oci --pod default/trainer"),
        ("The same merged into a spec of your own", "topobus oci --pod default/trainer --spec config.json"),
        ("When its container has ended", "topobus oci --pod default/trainer --undo"),
    ),
    "place": (
        ("Where the example would go, and why; nothing is held", "topobus place examples/pods/trainer.yaml --dry-run"),
        ("Hold it; `topobus release pod trainer` ends that", "topobus place examples/pods/trainer.yaml"),
    ),
    "pods": (
        ("Which container has which devices", "topobus pods"),
        ("Of one node and namespace", "topobus pods --node n1 --namespace research"),
    ),
    "profile build": (
        ("A DGX to run on", "topobus profile build dgx /tmp/dgx"),
        ("One of your own", "topobus profile build lab.toml /tmp/lab"),
    ),
    "profile list": (("Which machines come with Topobus", "topobus profile list"),),
    "profile offline": (("Take CPU 5 offline", "topobus profile offline /tmp/dgx 5"),),
    "profile online": (("Bring CPU 5 back", "topobus profile online /tmp/dgx 5"),),
    "profile play": (("A bad day, five times as fast", "topobus profile play /tmp/flaky --speed 5"),),
    "profile remove": (("Pull a GPU out", "topobus profile remove /tmp/dgx 0000:18:00.0"),),
    "profile restore": (("Put it back", "topobus profile restore /tmp/dgx 0000:18:00.0"),),
    "record": (("This machine as a folder, to try pods on it elsewhere", "topobus record my-server"),),
    "release claim": (("Free what a claim holds whose object is gone", "topobus release claim default/pair"),),
    "release pod": (("End what `topobus place` held", "topobus release pod default/trainer"),),
    "repair explain": (("Why nothing is done about this GPU, or what", "topobus repair explain gpu-0000-18-00-0"),),
    "repair list": (("What is under repair, and what waits for a person", "topobus repair list"),),
    "repair pause": (("While you work on the fleet", "topobus repair pause --for 2h --why 'driver 580'"),),
    "repair resume": (("Let repairs go on", "topobus repair resume"),),
    "simulate": (
        ("Do these pods fit on a DGX?", "topobus simulate --machine dgx --pods examples/pods"),
        (
            "On a recorded machine, as a node with another policy would",
            "topobus simulate --machine my-server --pods pods --policy single-numa-node",
        ),
    ),
    "defrag": (
        ("Which pods are in the way of this one?", "topobus defrag --for pod.yaml"),
        ("Evict them, one after the other", "topobus defrag --for pod.yaml --evict"),
    ),
    "free": (
        ("What is free, by driver and model", "topobus free"),
        ("Node by node, drawn", "topobus free --by node --by model"),
        ("How many more of this pod fit", "topobus free --for pod.yaml"),
    ),
    "snapshot": (
        ("Of the cluster of the current kubeconfig context", "topobus snapshot cluster.json.gz"),
        ("For somebody else, without your names", "topobus snapshot cluster.json.gz --replace-names"),
    ),
    "what-if": (
        ("Where do the pods of a node go?", "topobus what-if --without node/big-1"),
        ("With one more DGX", "topobus what-if -f node-and-slices.yaml"),
    ),
    "why": (
        ("Why does this pod wait?", "topobus why pod/train"),
        ("In another namespace, until it fits", "topobus why pod/train -n team-a --watch"),
        ("From a file, without any server", "topobus why pod/train --snapshot cluster.json.gz"),
        ("Why is this claim not allocated, for a program", "topobus why claim/gpus -o json"),
    ),
    "size": (
        ("What 300 nodes like a DGX need", "topobus size --nodes 300 --machine dgx"),
        ("With 20,000 claims an hour", "topobus size --nodes 300 --machine my-server --claims-per-hour 20000"),
    ),
    "slices": (
        ("What a DGX will publish", "topobus slices --machine dgx"),
        ("Its GPUs for Karpenter", "topobus slices --machine dgx --class gpu --template"),
    ),
    "topo": (
        ("GPUs, NICs and FPGAs of the running system", "topobus topo"),
        ("GPUs and NICs of this machine, without any server", "topobus topo --root / --class gpu --class nic"),
        ("Of a recorded machine, for a program", "topobus topo --machine dgx -o json"),
    ),
    "top": (
        ("All nodes live; Enter draws one, / filters, ? lists all keys, q ends it", "topobus top"),
        ("Begin with the drawing of one node", "topobus top --node node-a"),
        ("All nodes once, for a program", "topobus top --json"),
    ),
    "up": (
        ("A recorded machine with eight GPUs", "topobus up"),
        ("This machine's own devices, with a state that stays", "topobus up --real --dir ~/topobus"),
    ),
    "logs": (
        ("The log of the GPU service, followed", "topobus logs gpu -f"),
        ("The last 50 lines of all services", "topobus logs --tail 50"),
        ("Warnings of the last ten minutes", "topobus logs --since 10m -o json | grep '\"warning\"'"),
    ),
    "verify": (
        (
            "The files of a release, before they are installed",
            "topobus verify topobus-0.1.0-py3-none-any.whl --key topobus-release.pub",
        ),
    ),
    "version": (
        ("Of everything that runs, by node", "topobus version"),
        ("Of this program alone, for a script", "topobus version --client -o json"),
    ),
}
