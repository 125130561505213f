"""Slow cases of parametrized tests. They run only before a release, like tests marked `release`; other cases always run.

cases: file -> names of cases, one per line; `*` matches any text. tests/ground/test_releases.py checks that the names exist"""
import re

import pytest

cases = {
'capture/test_missing_gradients.py': '''
    test_compiled_models_have_the_same_rows[inductor-UnusedRowOfAParameter]
    test_compiled_models_have_the_same_rows[inductor-Cut]
    ''',
'recorder/test_merged_plans.py': '''
    test_rows_are_those_of_the_general_way[gpt2-gradients]
    ''',
'recorder/test_attention.py': '''
    test_compiled_code_has_the_same_rows_and_bits[inductor-*
    test_numbers_equal_those_of_explicit_weights[Qwen2ForCausalLM-*
    test_numbers_equal_those_of_explicit_weights[MistralForCausalLM-*
    test_numbers_equal_those_of_explicit_weights[GPTNeoXForCausalLM-*
    test_numbers_equal_those_of_explicit_weights[DistilBertForMaskedLM-*
    test_numbers_equal_those_of_explicit_weights[BartForConditionalGeneration-*
    test_compiled_code_has_the_same_rows_and_bits[aot_eager-True]
    test_multihead_attention[True]
    ''',
'integrations/test_pages_of_integrations.py': '''
    test_the_program_runs_and_records_layers[55_accelerate]
    ''',
'integrations/test_transformers_libraries.py': '''
    test_trainers_of_trl[SFT]
    test_trainers_of_trl[SFT-peft]
    test_trainers_of_trl[DPO]
    ''',
'capture/test_compiled.py': '''
    test_checkpointing[False-blocks]
    test_a_model_that_writes_into_its_input[inductor]
    test_whole[inductor]
    test_in_place_and_views[inductor]
    test_two_calls_with_one_tensor[inductor]
    test_leaves_keep_no_hooks[inductor]
    test_compiled_autograd[eager-*
    test_checkpointing[True-blocks]
    test_checkpointing[False-whole]
    test_schedules[blocks-te.step]
    test_schedules[whole-optimizer]
    test_compiled_autograd[aot_eager-eager-*
    test_whole[eager]
    test_passes_before_the_first_te_step[each-whole]
    test_passes_before_the_first_te_step[sum-whole]
    test_passes_before_the_first_te_step[after-blocks]
    test_vmap_of_an_armed_model[over_columns-aot_eager]
    test_vmap_of_an_armed_model[over_samples-aot_eager]
    test_vmap_of_an_armed_model[over_samples-inductor]
    test_vmap_of_an_armed_model[beside_a_plain_tensor-aot_eager]
    test_schedules[whole-by itself]
    test_vmap_of_the_gradient_of_an_armed_model[eager]
    ''',
'capture/test_activations.py': '''
    test_compiled[inductor-*
    test_compiled[aot_eager-in place-*
    test_compiled[aot_eager-whole-after]
    ''',
'capture/test_compiled_models.py': '''
    test_inductor[branches]
    test_rows_in_one_graph_are_those_of_eager_mode[gpt2]
    test_rows_in_one_graph_are_those_of_eager_mode[alexnet]
    test_inductor[cells]
    test_inductor[routed]
    test_rows_in_one_graph_are_those_of_eager_mode[llama]
    test_rows_in_one_graph_are_those_of_eager_mode[vit]
    test_rows_in_one_graph_are_those_of_eager_mode[encoder]
    test_rows_in_one_graph_are_those_of_eager_mode[resnet]
    test_rows_in_several_graphs_are_those_of_eager_mode[tagger]
    ''',
'capture/test_model_events.py': '''
    test_each_listener_gets_the_same_events_as_alone[whole-passes-everything]
    test_each_listener_gets_the_same_events_as_alone[whole-ember-their gradients]
    test_each_listener_gets_the_same_events_as_alone[blocks-monitor-activations]
    test_each_listener_gets_the_same_events_as_alone[blocks-their gradients-ember]
    test_each_listener_gets_the_same_events_as_alone[whole-their gradients-*
    test_a_listener_armed_inside_a_pass_gets_the_next_pass_completely[whole]
    test_each_listener_gets_the_same_events_as_alone[whole-monitor-activations]
    ''',
'devices/test_late_device.py': '''
    test_a_scale_is_not_waited_for[operations-numerics]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-plain-all-one by one]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-plain-all-fused]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-*-all-foreach]
    test_a_layer_that_is_called_on_two_streams_in_turn[operations-*
    test_a_loss_that_was_scaled[operations-one step skipped-*
    test_a_loss_that_was_scaled[operations-all finite-fused]
    test_branches_side_by_side[operations-ttypes1]
    test_a_pass_on_a_stream_of_its_own[operations-*
    test_a_model_on_two_devices[operations-1]
    test_a_loss_that_was_scaled[operations-all finite-foreach]
    ''',
'health/test_diff.py': '''
    test_runs_that_differ_by_rounding_are_the_same[order in a batch, large steps]
    test_runs_that_differ_by_rounding_are_the_same[order in a batch, BatchNorm, SGD]
    test_runs_that_differ_by_rounding_are_the_same[order in a batch, only weights]
    test_runs_that_differ_by_rounding_are_the_same[order in a batch, each fifth step]
    test_runs_that_differ_by_rounding_are_the_same[order in a batch, all types]
    test_compiled_is_the_same_as_eager[inductor]
    test_runs_that_differ_by_rounding_are_the_same[two threads]
    ''',
'jaxember/test_jaxember.py': '''
    test_a_training_has_a_row_for_each_array_and_does_not_change[nnx]
    test_a_training_has_a_row_for_each_array_and_does_not_change[transformer]
    test_a_training_has_a_row_for_each_array_and_does_not_change[normed]
    test_a_training_has_a_row_for_each_array_and_does_not_change[branched]
    test_a_training_has_a_row_for_each_array_and_does_not_change[recurrent]
    test_a_training_has_a_row_for_each_array_and_does_not_change[bfloat16]
    test_a_training_has_a_row_for_each_array_and_does_not_change[equinox]
    test_a_training_has_a_row_for_each_array_and_does_not_change[donated]
    test_a_training_has_a_row_for_each_array_and_does_not_change[per_example]
    test_a_training_has_a_row_for_each_array_and_does_not_change[static]
    ''',
'jaxember/test_jax_summaries.py': '''
    test_rows_inside_of_transformations_equal_those_outside[True]
    ''',
'jaxember/test_jax_cases.py': '''
    test_outputs_of_two_models_have_the_paths_of_their_weights[one step]
    test_constants_of_a_scanned_body_are_recorded_once[False-True]
    test_a_loop_with_a_stopped_gradient_is_recorded_once[False-for metrics, too]
    test_nested_checkpoints_record_each_value_once[nothing-nested-3]
    test_outputs_of_two_models_have_the_paths_of_their_weights[no state]
    test_steps_of_a_scanned_training_are_calls[True-50]
    ''',
'recorder/test_black_box.py': '''
    test_a_kill_at_any_moment_loses_no_finished_step[2-noted]
    test_the_module_that_ran_is_named[bus-23]
    test_the_module_that_ran_is_named[fpe-23]
    test_a_kill_at_any_moment_loses_no_finished_step[2-loader]
    test_a_kill_at_any_moment_loses_no_finished_step[2-compiled]
    test_the_last_steps_are_kept_whatever_the_schedule[raise-*
    test_the_last_steps_are_kept_whatever_the_schedule[nan-*
    ''',
'frameworks/test_reduce.py': '''
    test_ends_of_all_kinds[destroys]
    test_ends_of_all_kinds[exits]
    ''',
'sinks/test_sinks.py': '''
    test_sinks_can_be_pickled[MLflow]
    ''',
'show/test_show.py': '''
    test_each_picture_of_an_ember_a_tracker_and_a_table[dark_background-*
    test_each_picture_of_an_ember_a_tracker_and_a_table[default-compare]
    test_each_picture_of_an_ember_a_tracker_and_a_table[default-updates]
    ''',
'store/test_rotation.py': '''
    test_who_is_killed_at_any_call_that_touches_the_disk[joined]
    ''',
'store/test_compact.py': '''
    test_answers_are_those_of_the_lines[over]
    test_who_compacts_may_be_killed[over]
    ''',
'store/test_log_faults.py': '''
    test_ends[error]
    ''',
'ground/test_readme.py': '''
    test_a_block_that_stands_alone_runs_alone[1]
    ''',
'measure/test_numbers.py': '''
    test_fuzz_threads[torch]
    test_fuzz[torch-1]
    test_fuzz[torch-2]
    test_fuzz[torch-3]
    test_fuzz[loops-2]
    test_fuzz[loops-3]
    test_fuzz_large[torch]
    test_fuzz[loops-1]
    ''',
'run/test_run.py': '''
    test_program_ends_as_under_python[sys.exit('why')]
    test_program_ends_as_under_python[raise KeyboardInterrupt]
    test_program_ends_as_under_python[os._exit(4)]
    test_program_ends_as_under_python[raise ValueError('it')]
    test_program_ends_as_under_python[os.kill*
    ''',
'show/test_report.py': '''
    test_a_page_accepts_odd_tables[a logframe]
    test_a_page_accepts_odd_tables[gradients that vanish]
    test_a_page_accepts_odd_tables[still going on]
    test_a_page_accepts_odd_tables[every third step]
    test_a_page_accepts_odd_tables[a constant]
    ''',
'show/test_words_of_pictures.py': '''
    test_all_names_and_orders_of_arguments_are_equal[exp_hist]
    test_all_names_and_orders_of_arguments_are_equal[updates]
    test_all_names_and_orders_of_arguments_are_equal[surface]
    test_all_names_and_orders_of_arguments_are_equal[ridge]
    test_all_names_and_orders_of_arguments_are_equal[out_of_range]
    test_one_panel_is_its_axes_and_several_are_panels[exp_hist]
    test_one_panel_is_its_axes_and_several_are_panels[overview]
    test_one_panel_is_its_axes_and_several_are_panels[ridge]
    test_all_names_and_orders_of_arguments_are_equal[tree]
    test_all_names_and_orders_of_arguments_are_equal[scalar_global_heatmap]
    ''',
'cli/test_cli.py': '''
    test_help_and_its_example[check]
    test_tail_of_a_run_that_another_process_writes[kill]
    test_tail_of_a_run_that_another_process_writes[interrupt]
    ''',
'measure/test_devices.py': '''
    test_checks_run_without_the_modes_and_default_device_of_the_user[Count()]
    test_checks_run_without_the_modes_and_default_device_of_the_user[torch.inference_mode()]
    test_checks_run_without_the_modes_and_default_device_of_the_user[torch.autocast('cpu', torch.bfloat16)]
    ''',
'ground/test_programs.py': '''
    test_a_forked_program_is_like_a_new_python[True]
    ''',
'compat/test_visualization.py': '''
    test_wandb_offline[wandb]
    ''',
'frames/test_frames.py': '''
    test_regular_logs_take_the_quick_way[1]
    test_regular_logs_take_the_quick_way[2]
    test_regular_logs_take_the_quick_way[3]
    ''',
'capture/test_private_torch.py': '''
    test_the_same_rows_without[the compiler]
    test_the_same_rows_without[everything]
    ''',
'monitor/test_quantity_rows.py': '''
    test_pictures[5-overview]
    test_pictures[5-overview of a statistic]
    test_pictures[5-scalar_line*
    test_pictures[5-exp_hist]
    test_pictures[5-updates]
    test_pictures_of_tables[5-overview]
    test_pictures_of_tables[5-scalar_global_heatmap]
    test_pictures_of_tables[5-ridge]
    test_pictures_of_tables[5-compare]
    test_vectors[5-*
    test_live[5]
    test_pictures[5-*
    ''',
'frames/test_scan.py': '''
    test_one_question[several-polars]
    test_one_question[several-arrow]
    test_one_question[several-*
    ''',
'faults/test_hostile.py': '''
    test_pictures_of_fields_of_another_type[step]
    test_pictures_of_fields_of_another_type[module]
    test_pictures_of_fields_of_another_type[shape]
    test_fields_of_another_type[pname-some]
    test_fields_of_another_type[tname-some]
    test_fields_of_another_type[path-some]
    test_fields_of_another_type[run-some]
    ''',
'health/test_no_numpy_warnings.py': '''
    test_a_run_of_odd_numbers_gives_no_numpy_warning[all masked]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[inf]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[nan]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[zero]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[scalar]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[tiny]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[half]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[complex]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[whole]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[loss nan]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[loss -inf]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[loss 0.0]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[loss 1e+30]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[data 0.0]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[data 1e+20]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[data inf]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[double]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[empty]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[data nan]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[both]
    test_a_run_of_odd_numbers_gives_no_numpy_warning[mask]
    ''',
'health/test_zoo.py': '''
    test_a_healthy_training_has_no_finding[pruned_with_masks]
    test_a_healthy_training_has_no_finding[bert_with_masks]
    test_a_healthy_training_has_no_finding[so_48594888_corrected]
    test_a_healthy_training_with_all_statistics_has_no_finding[cell_by_hand]
    test_a_healthy_training_with_all_statistics_has_no_finding[mostly_noise]
    test_a_healthy_training_with_all_statistics_has_no_finding[unet_of_blobs]
    test_a_healthy_training_with_all_statistics_has_no_finding[rezero_and_masks_of_infinity]
    test_a_healthy_training_with_all_statistics_has_no_finding[mixture_density]
    test_a_healthy_training_with_all_statistics_has_no_finding[flow_of_time]
    test_a_healthy_training_has_no_finding[batches_of_four]
    test_a_healthy_training_has_no_finding[pole_on_a_cart]
    test_a_healthy_training_has_no_finding[deep_tanh_xavier]
    test_a_healthy_training_has_no_finding[diffusion_of_points]
    test_a_healthy_training_has_no_finding[so_48221692_corrected]
    test_a_healthy_training_has_no_finding[policy_gradient_by_hand]
    test_a_healthy_training_has_no_finding[triplets_mostly_solved]
    test_the_first_finding_is_the_planted_fault[eight_sigmoids_fall_to_guessing]
    test_the_first_finding_is_the_planted_fault[so_48221692]
    test_the_first_finding_is_the_planted_fault[so_50079585]
    ''',
'monitor/test_monitor.py': '''
    test_values_equal_numpy[compiled before]
    test_values_equal_numpy[ember first]
    ''',
'ground/test_benchmarks.py': '''
    test_rows_of_trainings_run[steps]
    ''',
'run/test_trained.py': '''
    test_compiled[after]
    test_compiled[in place]
    test_one_of_two_models_is_scaled[plain-Scales]
    ''',
'jaxember/test_health_of_jax.py': '''
    test_the_fault_is_the_first_finding[fault4*
    test_the_fault_is_the_first_finding[fault3*
    test_the_fault_is_the_first_finding[fault2*
    test_the_fault_is_the_first_finding[fault5*
    ''',
'capture/test_armed.py': '''
    test_case[DistributedDataParallel]
    ''',
'capture/test_storage.py': '''
    test_an_armed_training[dtype12-full-True]
    ''',
'store/test_shared.py': '''
    test_each_log_keeps_each_row[2]
    test_each_log_keeps_each_row[3]
    test_who_is_stopped_in_between_loses_nothing[lists]
    test_who_is_stopped_in_between_loses_nothing[last list]
    test_somebody_else_writes_parts_meanwhile[1]
    ''',
'recorder/test_roots.py': '''
    test_a_compiled_part_begins_the_pass_as_an_uncompiled_part_does[False-2]
    test_a_compiled_part_begins_the_pass_as_an_uncompiled_part_does[True-3]
    ''',
}


def mark(items, root): # root: the folder of all tests
    """Mark the slow cases among collected tests, so that they run only before a release.

    Return names in `cases` that match no test, and tests without any remaining case."""
    of = {}
    for o in items:
        if o.path.is_relative_to(root): of.setdefault(str(o.path.relative_to(root)), []).append(o)
    unknown,bare = [],[]
    for name in cases.keys() & of.keys():
        marked = set()
        for case in map(str.strip, cases[name].strip().splitlines()):
            like = re.compile(re.escape(case).replace(r'\*', '.*'))
            found = [o for o in of[name] if like.fullmatch(o.name)]
            for o in found: o.add_marker(pytest.mark.release)
            marked |= {o.originalname for o in found}
            if not found: unknown.append(f'{name}: {case}')
        bare += [f'{name}: {n}' for n in sorted(marked-{o.originalname for o in of[name] if not o.get_closest_marker('release')})]
    return unknown, bare
