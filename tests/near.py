"For each Python module of torchember, the tests that check it"
import json
import re
from functools import cache
from pathlib import Path

root = Path(__file__).parent.parent
armed = ' '.join(f"tests/{t.replace('/', '/test_')}.py" for t in
    ('capture/models recorder/steps recorder/gradients capture/armed capture/forward recorder/roots recorder/exchanged recorder/optimizers '
    'store/runs capture/compiled').split())
near = { # Python module or package -> its tests, fastest first
    'ground.messages': 'nbs/05_ground/10_messages.ipynb tests/ground/test_messages.py',
    'ground.record': 'nbs/05_ground/20_record.ipynb tests/store/test_log_values.py',
    'ground.choose': 'nbs/05_ground/30_choose.ipynb tests/recorder/test_runs_of_embers.py',
    'ground.needs': 'nbs/05_ground/00_needs.ipynb tests/ground/test_light.py',
    'ground.progress': 'nbs/05_ground/40_progress.ipynb',
    'frames.words': 'nbs/50_frames/00_words.ipynb tests/show/test_words_of_pictures.py',
    'show': 'nbs/60_show tests/frames/test_rules_of_tables.py tests/show/test_show.py',
    'show.select': 'nbs/60_show/10_select.ipynb tests/frames/test_rules_of_tables.py tests/show/test_show.py',
    'show.live.following': 'tests/show/test_following.py nbs/60_show/91_following.ipynb nbs/62_board/10_listing.ipynb',
    'show.page.data': 'nbs/60_show/96_page_data.ipynb tests/show/test_report.py',
    'show.page.document': 'nbs/60_show/98_page.ipynb tests/show/test_report.py',
    'show.controls': 'tests/show/test_controls.py nbs/60_show/82_controls.ipynb nbs/60_show/94_pointing.ipynb',
    'show.pointing': 'tests/show/test_controls.py nbs/60_show/94_pointing.ipynb tests/show/test_interactive.py',
    'show.live.live_view': 'tests/show/test_following.py nbs/62_board/40_live_view.ipynb tests/show/test_live.py',
    'recorder.budget': 'nbs/40_recorder/02_budget.ipynb tests/recorder/test_budget.py',
    'recorder.plan': 'nbs/40_recorder/90_plan.ipynb tests/recorder/test_plan.py',
    'measure.summary': 'nbs/20_measure/00_summary.ipynb tests/measure/test_numbers.py',
    'measure.head': 'nbs/20_measure/01_head.ipynb nbs/20_measure/03_numba.ipynb nbs/20_measure/50_tap.ipynb',
    'measure.exponents': 'nbs/20_measure/02_exponents.ipynb tests/measure/test_numbers.py',
    'measure.readers.numba': 'nbs/20_measure/03_numba.ipynb tests/measure/test_numbers.py',
    'measure.readers.triton': 'nbs/20_measure/04_triton.ipynb tests/measure/test_triton.py',
    'measure.elements': 'nbs/20_measure/05_elements.ipynb tests/measure/test_numbers.py',
    'measure.readers.torch': 'nbs/20_measure/06_torch.ipynb tests/measure/test_numbers.py',
    'measure.loading': 'nbs/20_measure/07_loading.ipynb tests/measure/test_loading.py',
    'measure.kernels': 'nbs/20_measure/08_kernels.ipynb tests/measure/test_numbers.py',
    'measure.columns': 'nbs/20_measure/09_columns.ipynb nbs/20_measure/10_stats.ipynb tests/measure/test_numbers.py',
    'measure.stats': 'nbs/20_measure/10_stats.ipynb tests/recorder/test_gradients.py',
    'measure.devices': 'nbs/20_measure/01_devices.ipynb tests/measure/test_devices.py tests/devices/test_late_device.py',
    'measure.self_check': 'nbs/20_measure/02_self_check.ipynb tests/measure/test_devices.py tests/measure/test_loops.py tests/devices/test_late_device.py',
    'measure.blocks': 'nbs/20_measure/45_blocks.ipynb nbs/20_measure/48_arena.ipynb nbs/20_measure/50_tap.ipynb',
    'measure.snapshot': 'nbs/20_measure/46_snapshot.ipynb nbs/20_measure/50_tap.ipynb tests/store/test_rows.py',
    'measure.unread': 'nbs/20_measure/47_unread.ipynb tests/devices/test_late_device.py',
    'measure.arena': 'nbs/20_measure/48_arena.ipynb nbs/20_measure/50_tap.ipynb tests/devices/test_late_device.py',
    'measure.graph_rows': 'nbs/20_measure/55_graph_rows.ipynb tests/devices/test_late_graphs.py',
    'recorder.graphs': 'nbs/40_recorder/79_graphs.ipynb tests/devices/test_late_graphs.py',
    'capture.hidden_attributes': 'nbs/10_capture/12_hidden_attributes.ipynb tests/capture/test_copies.py tests/capture/test_rules_of_capture.py',
    'capture.look_alike': 'nbs/10_capture/14_look_alike.ipynb tests/capture/test_forward.py tests/capture/test_compiled_models.py',
    'capture.partial_sums': 'nbs/10_capture/17_partial_sums.ipynb nbs/10_capture/20_forward.ipynb tests/capture/test_sums.py',
    'capture.graphs': 'nbs/10_capture/44_graphs.ipynb tests/devices/test_late_graphs.py',
    'measure.tap': 'nbs/20_measure/50_tap.ipynb tests/recorder/test_gradients.py nbs/57_ember.ipynb tests/devices/test_late_device.py',
    'store.base': 'nbs/30_store/00_base.ipynb nbs/30_store/15_jsonl.ipynb tests/store/test_log_faults.py',
    'store.table': 'nbs/30_store',
    'store.lines': 'nbs/30_store tests/store/test_log_values.py tests/store/test_log_faults.py',
    'store.columns': 'nbs/30_store tests/store/test_log_values.py tests/frames/test_frames.py',
    'store.parts': 'nbs/30_store/09_parts.ipynb tests/store/test_compact.py tests/store/test_shared.py tests/store/test_rotation.py',
    'store.shared': 'nbs/30_store/10_shared.ipynb tests/store/test_shared.py',
    'store.rotation': 'nbs/30_store/12_rotation.ipynb tests/store/test_rotation.py',
    'frames.belongings': 'nbs/50_frames/06_belongings.ipynb tests/frames/test_belongings.py',
    'processes.module_names': 'nbs/42_processes/02_module_names.ipynb tests/frames/test_ranks_of_logs.py',
    'processes.axes': 'nbs/42_processes/03_axes.ipynb tests/frames/test_ranks_of_logs.py',
    'processes.compare': 'nbs/42_processes/04_compare.ipynb tests/frames/test_ranks_of_logs.py tests/processes/test_whole_steps.py',
    'processes.shards': 'nbs/42_processes/05_shards.ipynb tests/frames/test_ranks_of_logs.py tests/processes/test_whole_steps.py',
    'processes.columns': 'nbs/42_processes/06_columns.ipynb tests/frames/test_ranks_of_logs.py tests/processes/test_whole_steps.py',
    'processes.merge': 'nbs/42_processes/08_merge.ipynb tests/processes/test_norms_of_ranks.py tests/frames/test_ranks_of_logs.py '
        'tests/processes/test_whole_steps.py',
    'processes.checks': 'nbs/42_processes/09_checks.ipynb tests/frames/test_ranks_of_logs.py tests/processes/test_whole_steps.py',
    'processes.ranks': 'nbs/42_processes/10_ranks.ipynb tests/frames/test_ranks_of_logs.py',
    'processes.whole_steps': 'nbs/42_processes/30_whole_steps.ipynb tests/processes/test_whole_steps.py',
    'processes.packed_rows': 'nbs/42_processes/20_packed_rows.ipynb tests/processes/test_whole_steps.py',
    'frames.chunks': 'nbs/50_frames/07_chunks.ipynb tests/frames/test_chunks.py tests/store/test_shared.py',
    'frames.dataset': 'nbs/50_frames/08_dataset.ipynb tests/frames/test_chunks.py tests/frames/test_scan.py',
    'frames.scan': 'nbs/50_frames/09_scan.ipynb tests/frames/test_scan.py',
    'frames.moving': 'nbs/50_frames/08_moving.ipynb tests/frames/test_moving.py',
    'frames.logs': 'nbs/50_frames tests/frames/test_rules_of_tables.py tests/frames/test_frames.py',
    'compat.tracker': 'nbs/80_compat/20_tracker.ipynb tests/compat/test_track.py',
    'compat.tandv': 'nbs/80_compat/30_tandv.ipynb tests/compat/test_track.py',
    'store.reading': 'nbs/30_store tests/frames/test_rules_of_tables.py tests/store/test_log_values.py tests/ground/test_light.py',
    'store.jsonl': 'nbs/30_store tests/store/test_settled.py tests/store/test_runs.py tests/store/test_log_values.py tests/store/test_log_faults.py',
    'measure.inverse': 'nbs/20_measure/12_inverse.ipynb nbs/42_processes/08_merge.ipynb tests/frames/test_ranks_of_logs.py',
    'measure.spectrum': 'nbs/20_measure/30_spectrum.ipynb tests/monitor/test_monitor.py',
    'measure.units': 'nbs/20_measure/40_units.ipynb tests/monitor/test_monitor.py',
    'monitor': 'nbs/47_monitor tests/monitor/test_monitor.py',
    'compat.taiyi': 'nbs/80_compat/40_taiyi.ipynb tests/compat/test_visualization.py',
    'show.surfaces': 'nbs/60_show/75_surfaces.ipynb tests/monitor/test_quantity_rows.py',
    'frames.unit_tables': 'nbs/50_frames/40_unit_tables.ipynb',
    'state.noise': 'nbs/70_state/20_noise.ipynb tests/state/test_noise.py',
    'state.layers': 'nbs/70_state/00_layers.ipynb nbs/70_state/06_algebra.ipynb tests/state/test_state.py',
    'state.tables': 'nbs/70_state/02_tables.ipynb tests/state/test_state.py',
    'state.plots': 'nbs/70_state/04_plots.ipynb tests/state/test_state.py',
    'state.algebra': 'nbs/70_state/06_algebra.ipynb nbs/70_state/10_ratios.ipynb tests/state/test_state.py',
    'state.factories': 'nbs/70_state/08_factories.ipynb tests/state/test_state.py tests/state/test_state_sharded.py',
    'compat.nnstat': 'nbs/80_compat/10_nnstat.ipynb tests/state/test_state.py',
    'state.ratios': 'nbs/70_state/10_ratios.ipynb tests/state/test_state.py',
    'recorder.refused': 'nbs/40_recorder/45_refused.ipynb tests/recorder/test_refused.py',
    'recorder.step_scalars': 'nbs/40_recorder/57_step_scalars.ipynb tests/recorder/test_step_scalars.py',
    'recorder.learning_rates': 'nbs/40_recorder/72_learning_rates.ipynb tests/recorder/test_step_scalars.py',
    'store.listeners': 'nbs/30_store/09_listeners.ipynb tests/recorder/test_listeners.py',
    'ground.plugins': 'nbs/05_ground/55_plugins.ipynb tests/ground/test_plugins.py',
    'recorder.steps': 'nbs/40_recorder/10_steps.ipynb tests/recorder/test_steps.py',
    'recorder.step_buffer': 'nbs/40_recorder/20_step_buffer.ipynb tests/devices/test_late_device.py tests/recorder/test_rules_of_rows.py',
    'recorder.parameters': 'nbs/40_recorder/30_parameters.ipynb tests/devices/test_late_device.py tests/recorder/test_exchanged.py',
    'recorder.gradients': 'nbs/40_recorder/40_gradients.ipynb tests/recorder/test_gradients.py tests/devices/test_late_device.py',
    'recorder': f'nbs/40_recorder tests/recorder/test_rules_of_rows.py nbs/57_ember.ipynb tests/recorder/test_optimizers.py {armed}',
    'jaxember.capture.trees': 'nbs/88_jaxember/12_trees.ipynb',
    'jaxember.recorder.recorder': 'nbs/88_jaxember/75_recorder.ipynb nbs/88_jaxember/80_tracker.ipynb tests/jaxember/test_jaxember.py',
    'jaxember.recorder.states': 'nbs/88_jaxember/50_states.ipynb tests/jaxember/test_rules_of_jax.py tests/jaxember/test_jaxember.py',
    'jaxember.capture.modules': 'nbs/88_jaxember/05_modules.ipynb',
    'jaxember.measure.summaries': 'nbs/88_jaxember/20_summaries.ipynb tests/jaxember/test_jax_summaries.py',
    'jaxember': 'nbs/88_jaxember tests/jaxember/test_jaxember.py',
    'recorder.arguments': 'nbs/40_recorder/85_arguments.ipynb nbs/57_ember.ipynb',
    'capture.ranks': 'nbs/10_capture/45_ranks.ipynb tests/capture/test_ranks_of_models.py tests/frameworks/test_ranks.py',
    'capture': f'nbs/10_capture {armed}',
    'health': 'nbs/55_health/50_diagnose.ipynb nbs/55_health/90_table.ipynb tests/health/test_rules_agree_with_rows.py',
    'sinks': 'nbs/56_sinks/60_feed.ipynb tests/sinks/test_sinks.py',
    'cli': 'nbs/95_cli/10_commands.ipynb tests/cli/test_cli.py',
    'ember': f'nbs/57_ember.ipynb {armed}'}


@cache
def notebooks():
    "Return a dict: name of a Python module -> path of its notebook, relative to the repository."
    found = {}
    for p in sorted((root/'nbs').rglob('*.ipynb')):
        code = '\n'.join(''.join(c['source']) for c in json.loads(p.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code')
        if m := re.search(r'^#\| default_exp ([\w.]+)$', code, re.M): found[m[1]] = str(p.relative_to(root))
    return found


def mentions(module):
    "Return the test files that import the Python module `module`."
    package,_,name = module.rpartition('.')
    names = [rf'torchember\.{re.escape(module)}\b', *([rf'from torchember\.{re.escape(package)} import .*\b{name}\b'] if package else [])]
    pattern = re.compile('|'.join(names))
    return [str(p.relative_to(root)) for p in sorted((root/'tests').rglob('test_*.py')) if pattern.search(p.read_text(encoding='utf-8'))]


def tests_near(module):
    """Return the tests of a Python module: its notebook, then the tests listed in `near`.

    Without an entry in `near`, return the test files that import the Python module."""
    keys = [k for k in near if f'{module}.'.startswith(f'{k}.')]
    return [*filter(None, [notebooks().get(module)]), *(near[max(keys, key=len)].split() if keys else mentions(module))]
