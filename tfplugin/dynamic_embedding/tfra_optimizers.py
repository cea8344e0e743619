"""Optimizers of tf_keras in TFRA's object-based checkpoints, whose lists of slots have tables among dense variables.

TFRA tracks the slots of a table twice: as a table, ``optimizer/<variable>/<lookup>/<slot>/tables_of_...``, and in the
optimizer's lists as a variable of the rows of the last step, such as ``optimizer/_variables/1`` of the full name
``Adam/<variable>/<lookup>/<slot>``. Here the lists have slots of dense variables alone.
"""

from __future__ import annotations

from typing import Any


def leave_out_tables(position: Any) -> None:
    """Takes the slots of tables out of the lists of an optimizer that is about to be restored.

    Args:
      position: the optimizer's, a `CheckpointPosition`. The object graph of its checkpoint is changed.
    """
    nodes, optimizer = position.checkpoint.object_graph_proto.nodes, position.object_proto
    tables = [
        child.local_name
        for child in optimizer.children
        if any(of_table.local_name.startswith("tables_of_") for of_table in nodes[child.node_id].children)
    ]
    if not tables:
        return
    ends = tuple(f"/{name}" for name in tables)
    for owner in optimizer.children:
        places = nodes[owner.node_id].children
        if not places or not all(place.local_name.isdecimal() for place in places):
            continue
        rows = [
            place.node_id
            for place in places
            if any(f"/{attribute.full_name}".endswith(ends) for attribute in nodes[place.node_id].attributes)
        ]
        kept = [p.node_id for p in sorted(places, key=lambda p: int(p.local_name)) if p.node_id not in rows]
        del places[:]
        for i, node in enumerate(kept):
            places.add(node_id=node, local_name=str(i))
    for node in nodes:
        if any(f"/{attribute.full_name}".endswith(ends) for attribute in node.attributes):
            del node.attributes[:]  # Nothing has to be restored from it.
