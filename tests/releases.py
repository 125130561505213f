"""Cases that take long, and of which a neighbour stays that takes the same way: they run before a release, as what is marked so where it stands

File -> name of a test, or of one of its cases, a line each; `*` is anything"""

cases = {
'capture/test_compiled.py': '''
    test_in_place_and_views[inductor]
    test_two_calls_with_one_tensor[inductor]
    test_leaves_keep_no_hooks[inductor]
    test_autocast
    test_compiled_autograd[eager-*
    test_checkpointing[True-blocks]
    test_checkpointing[False-whole]
    test_schedules[blocks-te.step]
    test_schedules[whole-optimizer]
    test_compiled_autograd[aot_eager-eager-*
    test_whole[eager]
    ''',
'capture/test_activations.py': '''
    test_compiled[inductor-*
    test_compiled[aot_eager-in place-*
    test_beside_an_ember[inductor-*
    test_beside_an_ember[aot_eager-blocks-*
    test_twelve_kinds_of_blocks
    ''',
'capture/test_compiled_models.py': '''
    test_inductor[cells]
    test_inductor[routed]
    test_in_one_graph[llama]
    test_in_one_graph[vit]
    test_in_one_graph[encoder]
    test_in_one_graph[resnet]
    test_in_several[tagger]
    ''',
'capture/test_hearing.py': '''
    test_each_is_told_what_it_is_told_alone[blocks-monitor-activations]
    test_each_is_told_what_it_is_told_alone[blocks-their gradients-ember]
    test_each_is_told_what_it_is_told_alone[whole-their gradients-*
    test_a_graph_is_made_for_what_is_wanted_and_not_for_who_wants_it[blocks]
    test_one_who_comes_in_the_middle_of_a_pass_hears_the_next_one_whole[whole]
    test_each_is_told_what_it_is_told_alone[whole-monitor-activations]
    ''',
'devices/test_late_device.py': '''
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-plain-all-one by one]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-plain-all-fused]
    test_the_numbers_are_those_of_the_cpu_and_nobody_waits[operations-*-all-foreach]
    test_a_layer_that_is_called_on_two_streams_in_turn[operations-*
    test_a_loss_that_was_scaled[operations-one step skipped-*
    test_a_loss_that_was_scaled[operations-all finite-fused]
    test_branches_side_by_side[operations-ttypes1]
    test_a_pass_on_a_stream_of_its_own[operations-*
    test_a_model_on_two_devices[operations-1]
    ''',
'health/test_diff.py': '''
    test_compiled_is_the_same_as_eager[inductor]
    test_what_rounding_parts_is_the_same[two threads]
    ''',
'jaxember/test_jaxember.py': '''
    test_numbers_and_rows[normed]
    test_numbers_and_rows[branched]
    test_numbers_and_rows[recurrent]
    test_numbers_and_rows[bfloat16]
    test_memory_is_flat
    test_their_notebook
    test_numbers_and_rows[equinox]
    test_numbers_and_rows[donated]
    test_numbers_and_rows[per_example]
    test_numbers_and_rows[static]
    ''',
'jaxember/test_jax_summaries.py': '''
    test_elsewhere[1]
    ''',
'jaxember/test_jax_cases.py': '''
    test_scanned_layers_that_run_twice
    test_two_models[one step]
    test_what_a_loop_gives_that_is_no_part_of_it[False-True]
    test_a_loop_whose_gradient_is_stopped[False-for metrics, too]
    test_nested_checkpoints[nothing-nested-3]
    test_two_models[no state]
    test_a_training_in_a_loop[True-50]
    ''',
'jaxember/test_jax_processes.py': '''
    test_two_devices_in_each_of_two_processes
    ''',
'recorder/test_black_box.py': '''
    test_killed_at_any_moment[2-loader]
    test_killed_at_any_moment[2-compiled]
    test_the_last_steps_whatever_the_schedule[raise-*
    test_the_last_steps_whatever_the_schedule[nan-*
    ''',
'frameworks/test_reduce.py': '''
    test_told_is_what_is_read[4-*
    test_told_is_what_is_read[2-*
    ''',
'sinks/test_sinks.py': '''
    test_a_process_that_ends_without_close_tells_the_last_step
    test_sinks_can_be_pickled[MLflow]
    ''',
'sinks/test_wandb_offline.py': '''
    test_a_run_that_the_user_opens_later_is_theirs[finish_previous]
    test_rows_of_the_users_have_no_older_numbers_under_a_newer_step
    test_visualization_opens_a_run_where_there_is_none
    test_track
    ''',
'show/test_interactive.py': '''
    test_pointing
    test_live
    test_images
    ''',
'show/test_show.py': '''
    test_each_picture_of_an_ember_a_tracker_and_a_table[dark_background-*
    ''',
'show/test_ranks_shown.py': '''
    test_every_picture_takes_its_name
    ''',
'board/test_board_in_browser.py': '''
    test_it_is_there_again_when_the_server_is
    ''',
'board/test_board_server.py': '''
    test_a_training_that_is_killed_leaves_its_last_words
    test_a_page_is_made_when_a_share_of_the_time_has_gone
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
'frames/test_moving.py': '''
    test_connections_that_end_in_the_middle_of_an_upload
    test_two_processes_bring_a_run_at_once
    ''',
'ground/test_readme.py': '''
    test_alone[*
    ''',
'ground/test_process.py': '''
    test_the_test_that_left_something_fail
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
'measure/test_loading.py': '''
    test_exit_meanwhile[0-True]
    ''',
'run/test_run.py': '''
    test_its_end_is_its_own[sys.exit('why')]
    test_its_end_is_its_own[raise KeyboardInterrupt]
    test_its_end_is_its_own[os._exit(4)]
    test_a_script_with_transformers[False]
    test_its_end_is_its_own[raise ValueError('it')]
    ''',
'show/test_report.py': '''
    test_a_page_of_whatever_there_is[gradients that vanish]
    test_a_page_of_whatever_there_is[still going on]
    test_a_page_of_whatever_there_is[every third step]
    test_a_page_of_whatever_there_is[a constant]
    ''',
'show/test_words_of_pictures.py': '''
    test_words_and_orders[exp_hist]
    test_words_and_orders[updates]
    test_words_and_orders[surface]
    test_words_and_orders[ridge]
    test_words_and_orders[out_of_range]
    ''',
'cli/test_cli.py': '''
    test_tail_of_a_run_that_another_process_writes[kill]
    test_tail_of_a_run_that_another_process_writes[interrupt]
    ''',
'show/test_live.py': '''
    test_no_close
    test_waits
    ''',
'measure/test_devices.py': '''
    test_what_is_tried_is_apart_from_what_the_user_has_around_it[Count()]
    test_what_is_tried_is_apart_from_what_the_user_has_around_it[torch.inference_mode()]
    test_what_is_tried_is_apart_from_what_the_user_has_around_it[torch.autocast('cpu', torch.bfloat16)]
    ''',
'measure/test_new_sum.py': '''
    test_jax[loops]
    test_cpu[armed-no loops]
    ''',
'ground/test_programs.py': '''
    test_as_a_python[True]
    ''',
'monitor/test_monitor.py': '''
    test_memory_is_flat
    ''',
'integrations/test_ignite_callback.py': '''
    test_two_processes
    ''',
'compat/test_visualization.py': '''
    test_wandb_offline[wandb]
    ''',
'frames/test_frames.py': '''
    test_with_and_without_msgspec
    test_regular_logs_take_the_quick_way[1]
    test_regular_logs_take_the_quick_way[2]
    test_regular_logs_take_the_quick_way[3]
    ''',
'frames/test_scan.py': '''
    test_on_two_workers[dask]
    ''',
'capture/test_private_torch.py': '''
    test_the_same_rows_without[the compiler]
    test_the_same_rows_without[everything]
    ''',
}
