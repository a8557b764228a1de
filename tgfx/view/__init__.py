"""What a person looks at: one page with the graph, the groups, the gates and the price; and graphs for other tools."""

from tgfx.view.dot import to_dot
from tgfx.view.explorer import to_model_explorer
from tgfx.view.graphs import to_networkx
from tgfx.view.visualize import visualize

__all__ = ["to_dot", "to_model_explorer", "to_networkx", "visualize"]
